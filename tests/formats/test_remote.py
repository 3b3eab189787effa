"""A checkpoint at a URL is the checkpoint that it is on a disk; what goes wrong on the way is told in one message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
import s3_store
from safetensors.numpy import save_file

from ckptguard.cli.main import run
from ckptguard.core.errors import DamagedError, EnvironmentFailedError, NotFoundError, UnsupportedError, UsageError
from ckptguard.core.index import Span
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.seal import seal
from ckptguard.engine.verify import verify
from ckptguard.formats.base import steps_below, trackers_of
from ckptguard.formats.registry import open_checkpoint, resolve
from ckptguard.formats.remote import RemoteDirectory, RemotePath, path_of

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"
DENSE = FIXTURES / "dense_tp2pp2_dp_reshardable"
STEP = "iter_0000004"


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_store.serving() as (_, files):
        files.put(str(DENSE), f"{s3_store.BUCKET}/runs/dense", recursive=True)
        yield files


def _same(url: str, local: Path) -> None:
    with open_checkpoint(url) as there, open_checkpoint(local) as here:
        assert there.index.tensors == here.index.tensors
        assert there.index.objects == here.index.objects
        assert there.index.files == here.index.files
        assert there.index.facts == here.index.facts
        assert there.index.location.startswith(url.partition("://")[0])
        assert fingerprint_checkpoint(there) == fingerprint_checkpoint(here)
    found, expected = verify(url), verify(local)
    assert (found.problems, found.proved, found.bytes_checked) == (
        expected.problems, expected.proved, expected.bytes_checked,
    )  # fmt: skip


def test_a_store_holds_what_the_disk_holds(s3: Any) -> None:
    _same("s3://bucket/runs/dense", DENSE)


@pytest.mark.parametrize(
    "name", ["dense_tp2pp2_integrity", "dense_tp2pp2_legacy_torch", "moe_pp2ep2_fully_reshardable"]
)
def test_every_format_is_read_at_a_url(memory: Any, name: str) -> None:
    memory.put(str(FIXTURES / name), "/there", recursive=True)
    _same("memory://there", FIXTURES / name)


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    assert path_of(f"file://{tmp_path}/with%20blank") == tmp_path / "with blank"
    assert type(path_of("file:///x")) is type(path_of("x")) is type(Path())
    with open_checkpoint(f"file://{DENSE}") as checkpoint:
        assert checkpoint.index.location == str(DENSE / STEP)


def test_roots_steps_and_trackers(memory: Any) -> None:
    memory.put(str(DENSE), "/run", recursive=True)
    memory.put(str(DENSE / STEP), "/run/release", recursive=True)
    root = path_of("memory://run")
    assert trackers_of(root) == {"latest_checkpointed_iteration.txt": "4"}
    assert {step: str(path) for step, path in steps_below(root).items()} == {
        "4": f"memory://run/{STEP}", "release": "memory://run/release",
    }  # fmt: skip
    assert str(resolve("memory://run")) == f"memory://run/{STEP}"
    assert str(resolve("memory://run/", step="release")) == "memory://run/release"
    with pytest.raises(UsageError, match="--step says 5"):
        resolve("memory://run", step="5")


def test_hugging_face_at_a_url(memory: Any, tmp_path: Path) -> None:
    local = tmp_path / "snapshot"
    local.mkdir()
    save_file({"a": np.arange(6, dtype=np.float32)}, local / "model.safetensors")
    (local / "config.json").write_text("{}")
    memory.put(str(local), "/hub/snapshot", recursive=True)
    _same("memory://hub/snapshot", local)
    _same("memory://hub/snapshot/model.safetensors", local / "model.safetensors")
    with pytest.raises(DamagedError, match="some in snapshot/"):
        open_checkpoint("memory://hub")


def test_commands(s3: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "s3://bucket/runs/dense", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["location"] == f"s3://bucket/runs/dense/{STEP}"
    assert run(["diff", "s3://bucket/runs/dense", str(DENSE), "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["different"]


def test_a_seal_is_written_and_notices_a_change(memory: Any) -> None:
    memory.put(str(DENSE), "/run", recursive=True)
    with open_checkpoint("memory://run") as checkpoint:
        seal(checkpoint, fingerprints=False)
    assert not verify("memory://run").damaged
    name = next(n for n in memory.find("/run") if n.endswith("__0_0.distcp"))
    data = bytearray(memory.cat_file(name))
    data[5000] ^= 1
    memory.pipe_file(name, bytes(data))
    assert any(p.kind == "changed" and p.file == "__0_0.distcp" for p in verify("memory://run").problems)


def test_truncated_and_missing_objects(s3: Any) -> None:
    target = f"{s3_store.BUCKET}/damaged"
    s3.put(str(DENSE / STEP), target, recursive=True)
    whole = s3.cat_file(f"{target}/__0_0.distcp")
    s3.pipe_file(f"{target}/__0_0.distcp", whole[:50_000])
    s3.rm_file(f"{target}/__1_0.distcp")
    kinds = {(p.kind, p.file) for p in verify(f"s3://{target}").problems if p.is_damage}
    assert ("size", "__0_0.distcp") in kinds
    assert ("missing-file", "__1_0.distcp") in kinds


def test_an_object_that_shrinks_or_goes_while_it_is_read(s3: Any) -> None:
    target = f"{s3_store.BUCKET}/changing"
    s3.pipe_file(f"{target}/data", bytes(300_000))
    s3.pipe_file(f"{target}/gone", bytes(300_000))
    with RemoteDirectory(_remote(f"s3://{target}")) as files:
        assert sorted(files.listing) == ["data", "gone"]
        s3.pipe_file(f"{target}/data", bytes(100_000))
        s3.rm_file(f"{target}/gone")
        for begin in (0, 90_000, 200_000):
            with pytest.raises(DamagedError, match="100000 bytes, but bytes"):
                files.read_into("data", begin, memoryview(bytearray(100_000 if begin else 300_000)))
        with pytest.raises(DamagedError, match="300000 bytes, but bytes 299999 to 300001"):
            files.read_span(Span("data", 299_999, 2))
        with pytest.raises(NotFoundError, match="s3://bucket/changing/gone"):
            files.read("gone")
        with pytest.raises(NotFoundError, match="never"):
            files.read("never")
        with pytest.raises(DamagedError, match="leads out"):
            files.checked_path("../data")


def test_a_server_that_goes_away_is_told_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with s3_store.serving() as (server, files), patch.object(type(files), "retries", 1):
        files.put(str(DENSE), f"{s3_store.BUCKET}/run", recursive=True)
        with open_checkpoint("s3://bucket/run") as checkpoint:
            server.stop()
            with pytest.raises(EnvironmentFailedError, match="s3://bucket/run/iter_0000004/__") as error:
                fingerprint_checkpoint(checkpoint)
        assert "the-" not in str(error.value)
        assert run(["verify", "s3://bucket/run"]) == 6
        said = capsys.readouterr().err
        assert "s3://bucket/run" in said
        assert "Traceback" not in said
        assert "the-secret" not in said


def test_reads_of_every_length_and_few_requests(memory: Any) -> None:
    data = np.random.default_rng(0).bytes(9_000_000)
    memory.pipe_file("/there/data", data)
    with RemoteDirectory(_remote("memory://there")) as files:
        for begin, length in [(0, 10), (262_100, 200), (8_999_990, 10), (100, 70_000), (1, 8_999_999), (5, 0)]:
            assert files.read_span(Span("data", begin, length)) == data[begin : begin + length]
        files.close()
        with patch.object(type(memory), "cat_file", side_effect=memory.cat_file) as asked:
            for begin in range(0, 1_000_000, 5000):
                files.read_span(Span("data", begin, 4096))
        assert asked.call_count == 4


def test_urls_that_cannot_be_used(memory: Any) -> None:
    with pytest.raises(UsageError, match="no-such-store"):
        open_checkpoint("no-such-store://x")
    with pytest.raises(UsageError, match="password") as error:
        open_checkpoint("ftp://me:hidden@host/x")
    assert "hidden" not in str(error.value)
    with pytest.raises(UnsupportedError, match="does not list"):
        open_checkpoint("https://host/x?token=hidden")
    with pytest.raises(NotFoundError, match="memory://nothing"):
        open_checkpoint("memory://nothing")
    with pytest.raises(UnsupportedError, match="local disk"):
        path_of("memory://nothing").open()


def test_an_unfinished_target_is_no_checkpoint(memory: Any) -> None:
    memory.put(str(DENSE), "/run", recursive=True)
    memory.pipe_file("/run/.ckptguard-journal/run.json", b"{}")
    for url in ("memory://run", f"memory://run/{STEP}"):
        with pytest.raises(DamagedError, match="unfinished"):
            open_checkpoint(url)


def _remote(url: str) -> RemotePath:
    path = path_of(url)
    assert isinstance(path, RemotePath)
    return path
