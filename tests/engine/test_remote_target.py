"""A target at a URL: the planned bytes, whole only at the end, gone on with after a failure, nothing cut short."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import numpy as np
import pytest
import s3_store
import write_cases as cases
from safetensors.numpy import save_file

from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import DamagedError, EnvironmentFailedError, UsageError
from ckptguard.core.pieces import Assembly, Piece
from ckptguard.core.plan import Made, Stored
from ckptguard.core.writing import Closing, Elements, Ending, Literal, TargetFile, WritePlan
from ckptguard.engine import filling, remote_target
from ckptguard.engine.filling import Filler
from ckptguard.engine.remote_target import RemoteStaging, part_bytes, write_remote
from ckptguard.engine.write_digests import digest_of
from ckptguard.formats.registry import open_checkpoint
from ckptguard.formats.remote import UNFINISHED, RemotePath, path_of

MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def _target(url: str) -> RemotePath:
    path = path_of(url)
    assert isinstance(path, RemotePath)
    return path


def _tree(files: Any, root: str) -> dict[str, bytes]:
    return {key.removeprefix(f"{root}/"): files.cat_file(key) for key in files.find(root)}


def _write(url: str, plan: WritePlan, fill: Any, **more: Any) -> dict[str, Any]:
    with RemoteStaging.open(_target(url), plan.identity, what="a test") as staging:
        digests = write_remote(plan, staging, fill, **more)
        staging.commit(cases.LAST)
    return digests


@pytest.mark.parametrize("seed", range(3))
def test_the_planned_bytes_are_there(memory: Any, seed: int) -> None:
    plan = cases.plan(5, seed=seed)
    digests = _write("memory://out", plan, cases.Source(plan))
    expected = cases.expected(plan)
    assert _tree(memory, "/out") == expected | cases.LAST
    assert digests == {name: digest_of(data) for name, data in expected.items()}
    assert list(digests) == [file.path for file in plan.files]


def test_an_ending_is_given_every_sum(memory: Any) -> None:
    parts = (Elements(1, 3 * MIB), Elements(2, 50), Closing(12, cases.tail, elements=2), Literal(b"x"))
    parts += (Elements(3, 10), Closing(12, cases.tail), Ending(30, lambda sums: b"%030x" % sum(sums)))
    plan = WritePlan((TargetFile("file", parts),), "identity")
    _write("memory://out", plan, cases.Source(plan))
    sums = [zlib.crc32(cases.content(1, 3 * MIB) + cases.content(2, 50)), zlib.crc32(cases.content(3, 10))]
    assert memory.cat_file("/out/file").endswith(cases.tail(sums[1]) + b"%030x" % sum(sums))


def test_an_unfinished_target_is_no_checkpoint_and_a_whole_one_is(memory: Any) -> None:
    plan = cases.plan(2)
    with RemoteStaging.open(_target("memory://out"), plan.identity, what="a test") as staging:
        write_remote(plan, staging, cases.Source(plan))
        seen = []
        put = memory.pipe_file
        with patch.object(type(memory), "pipe_file", side_effect=lambda key, data: (seen.append(key), put(key, data))):
            staging.commit(cases.LAST)
        assert seen == [f"/out/{name}" for name in cases.LAST]
        assert not memory.exists(f"/out/{UNFINISHED}")
    memory.pipe_file(f"/out/{UNFINISHED}", b"{}")
    with pytest.raises(DamagedError, match="unfinished"):
        open_checkpoint("memory://out")


def test_a_failed_run_leaves_no_cut_file_and_the_next_goes_on(memory: Any) -> None:
    plan = cases.plan(4, seed=1)
    fill = cases.Source(plan)
    failing = max(plan.files[2].parts, key=lambda p: p.length_bytes if isinstance(p, Elements) else -1)
    assert isinstance(failing, Elements)

    def fails(key: int, begin_bytes: int, out: memoryview) -> None:
        if key == failing.key:
            raise EnvironmentFailedError("the source is gone")
        fill(key, begin_bytes, out)

    with pytest.raises(EnvironmentFailedError, match="the source is gone"):
        _write("memory://out", plan, fails, threads=1)
    left = _tree(memory, "/out")
    expected = cases.expected(plan)
    done = {name for name in left if not name.startswith(".ckptguard")}
    assert done == {file.path for file in plan.files[:2]}
    memory.pipe_file(f"/out/{plan.files[1].path}", b"changed")
    memory.pipe_file("/out/left.over", b"x")
    fill.calls.clear()
    _write("memory://out", plan, fill)
    assert _tree(memory, "/out") == expected | cases.LAST
    again = {key for key, _, _ in fill.calls}
    assert again == {p.key for f in plan.files[1:] for p in f.parts if isinstance(p, Elements) and p.length_bytes}


def test_what_stands_there_is_left_alone(memory: Any) -> None:
    plan, other = cases.plan(1), cases.plan(2)
    memory.pipe_file("/out/file", b"x")
    memory.pipe_file("/one", b"x")
    for url in ("memory://out", "memory://one"):
        with pytest.raises(UsageError, match="is there already"):
            RemoteStaging.open(_target(url), plan.identity, what="a test")
    assert _tree(memory, "/out") == {"file": b"x"}
    RemoteStaging.open(_target("memory://run"), plan.identity, what="reshard of x")
    with pytest.raises(UsageError, match="left by reshard of x"):
        RemoteStaging.open(_target("memory://run"), other.identity, what="a test")


def test_a_run_killed_while_it_removed_its_journal_is_whole(memory: Any) -> None:
    plan = cases.plan(1)
    _write("memory://out", plan, cases.Source(plan))
    memory.pipe_file(f"/out/{remote_target._note_name('x')}", b"{}")
    with pytest.raises(UsageError, match="is there already"):
        RemoteStaging.open(_target("memory://out"), plan.identity, what="a test")
    assert _tree(memory, "/out") == cases.expected(plan) | cases.LAST


def test_a_file_that_vanished_is_not_committed(memory: Any) -> None:
    plan = cases.plan(2)
    with RemoteStaging.open(_target("memory://out"), plan.identity, what="a test") as staging:
        write_remote(plan, staging, cases.Source(plan))
        memory.rm_file(f"/out/{plan.files[1].path}")
        with pytest.raises(EnvironmentFailedError, match="no bytes, but"):
            staging.commit(cases.LAST)
    assert memory.exists(f"/out/{UNFINISHED}")


def test_memory_is_bounded(memory: Any) -> None:
    plan = cases.plan(1)
    with pytest.raises(UsageError, match="too few"):
        _write("memory://out", plan, cases.Source(plan), memory_bytes=8 * MIB)
    assert part_bytes(0) == part_bytes(100 * MIB) == 8 * MIB
    for size in (10**12, 5 * 10**12):
        assert size / part_bytes(size) <= 10_000


def test_a_store_with_multipart_uploads_and_its_end() -> None:
    large = TargetFile("iter_0000000/large", (Literal(b"head"), Elements(999, 17 * MIB), Closing(12, cases.tail)))
    small = cases.plan(2).files
    plan = WritePlan((large, *small), "identity")
    fill = cases.Source(plan)
    with s3_store.serving() as (server, files), patch.object(type(files), "retries", 1):
        _write("s3://bucket/out", plan, fill)
        assert _tree(files, "bucket/out") == cases.expected(plan) | cases.LAST
        assert len(files.info("bucket/out/iter_0000000/large")["ETag"].strip('"').split("-")) == 2  # it came in parts

        def stops(key: int, begin_bytes: int, out: memoryview) -> None:
            if key == 999 and begin_bytes > 10 * MIB:
                raise KeyboardInterrupt
            fill(key, begin_bytes, out)

        with pytest.raises(KeyboardInterrupt):
            _write("s3://bucket/broken", plan, stops)
        assert not files.exists("bucket/broken/iter_0000000/large")
        assert not files.list_multipart_uploads("bucket")

        def loses(key: int, begin_bytes: int, out: memoryview) -> None:
            if key == 999 and begin_bytes > 10 * MIB:
                server.stop()
            fill(key, begin_bytes, out)

        with pytest.raises(EnvironmentFailedError, match=r"s3://bucket/broken/\S+: cannot be written") as error:
            _write("s3://bucket/broken", plan, loses)
        assert "the-" not in str(error.value)


def test_pieces_are_gathered_from_a_store_as_from_a_disk(memory: Any, tmp_path: Path) -> None:
    values = np.arange(40 * 30 * 6, dtype=np.int32).reshape(40, 30, 6)
    save_file({"a": values}, tmp_path / "model.safetensors")
    memory.put(str(tmp_path), "/there", recursive=True)
    cut = values[3:37:2, 5:29, 1:5].transpose(1, 0, 2)
    strides = tuple(s // 4 for s in cut.strides)
    piece = Piece((0,) * 3, cut.shape, (1,) * 3, "a", 3 * 180 + 5 * 6 + 1, strides)
    plain = Piece((0,) * 3, (40, 30, 6), (1,) * 3, "a", 0, (180, 6, 1))
    for part, expected in ((piece, cut), (plain, values)):
        made = Made("a", BY_NAME["int32"], part.size, whole(part.size), Assembly(part.size, (part,)))
        for cover, direct in ((1 << 22, 1 << 20), (1 << 12, 1), (64, 1 << 20), (4, 1 << 20)):
            with (
                open_checkpoint("memory://there") as checkpoint,
                patch.multiple(filling, _COVER_BYTES=cover, _REMOTE_DIRECT_BYTES=direct),
            ):
                entry = checkpoint.index.tensors["a"]
                filler = Filler([made], {"a": Stored(entry, entry.chunks[0])}, checkpoint)
                out = bytearray(made.size_bytes)
                edges = [0, 1, part.size[0] // 2, part.size[0]]
                for begin, end in pairwise(edge * filling.row_bytes(made) for edge in edges):
                    filler(0, begin, memoryview(out)[begin:end])
            assert bytes(out) == expected.tobytes()
