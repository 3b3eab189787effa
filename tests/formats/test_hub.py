"""Snapshots from the hub: a real huggingface_hub against a hub on the loopback address."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from ckptguard.core.errors import EnvironmentFailedError, ExitCode, NotFoundError, UnsupportedError, UsageError
from ckptguard.formats import hub
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.hub_server import Hub, serve_hub

ID = "org/tiny"


def write(folder: Path, value: float, **more: bytes) -> Path:
    """A small snapshot, with files beside it that must not be downloaded."""
    (folder / "onnx").mkdir(parents=True)
    save_file({"x": torch.full((256, 4), value), "y": torch.ones(3)}, folder / "model.safetensors")
    save_file({"copy": torch.zeros(2)}, folder / "consolidated.safetensors")
    save_file({"copy": torch.zeros(2)}, folder / "onnx" / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name in (
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "pytorch_model.bin",
        "x.pth",
        "x.gguf",
        "a.py",
    ):
        (folder / name).write_bytes(name.encode())
    for name, data in more.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with a model in two revisions, a gated one, one of pickles, and one in Mistral's layout."""
    root = tmp_path_factory.mktemp("repos")
    main, other = write(root / "main", 1.0), write(root / "v2", 2.0)
    pickles, mistral = root / "pickles", root / "mistral"
    for folder in (pickles, mistral):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (pickles / "pytorch_model.bin").write_bytes(b"PK")
    save_file({"tok_embeddings.weight": torch.zeros(2)}, mistral / "consolidated.safetensors")
    repos = {
        ID: {"main": main, "v2": other, "refs/pr/7": other},
        "org/gated": {"main": main},
        "org/pickles": {"main": pickles},
        "org/mistral": {"main": mistral},
    }
    with serve_hub(repos, gated=["org/gated"]) as running:
        yield running


@pytest.fixture
def online(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Points huggingface_hub, whose settings are read at import, at the server and at an empty cache."""
    monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    huggingface_hub.close_session()  # so that the proxy settings are read again
    served.requests.clear()
    yield served
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-0.6B", True),
        ("org/name@main", True),
        ("org/name@refs/pr/12", True),
        ("org/name@0123456789abcdef", True),
        ("name", False),
        ("./org/name", False),
        ("/org/name", False),
        ("~/name", False),
        ("a/b/c", False),
        ("../name", False),
        ("org/..", False),
        ("org/name@", False),
        ("org/name@../x", False),
        ("org/na--me", False),
        ("org/" + "n" * 96, False),
        ("iter_0000010/model.safetensors", False),
        ("s3://bucket/name", False),
        ("org/name\n", False),
    ],
)
def test_what_looks_like_an_id(text: str, expected: bool) -> None:
    """Only what cannot be meant otherwise."""
    assert hub.looks_like_id(text) is expected


def test_local_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of that name is meant, with a revision behind it too."""
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not hub.looks_like_id("org/name")
    assert not hub.looks_like_id("org/name@main")
    assert hub.looks_like_id("org/other")


def test_download_takes_only_what_is_needed(online: Hub) -> None:
    """Weights once, config and tokenizer; no pickles, no other formats, no copies, no code."""
    with open_checkpoint(ID) as checkpoint:
        index = checkpoint.index
        assert index.problems == ()
        assert set(index.files) == {
            "model.safetensors", "config.json", "merges.txt", "tokenizer.model", "chat_template.jinja"
        }  # fmt: skip
        assert index.facts.extra["repository"] == ID
        assert index.facts.extra["commit"] == online.commit(ID)
        (chunk,) = index.tensors["x"].chunks
        assert checkpoint.files.read_span(chunk.span) == torch.full((1024,), 1.0).numpy().tobytes()
    assert not any(name in request for request in online.requests for name in (".bin", ".pth", ".gguf", "onnx"))


@pytest.mark.parametrize("revision", ["v2", "refs/pr/7", "commit"])
def test_revision_is_honoured(online: Hub, revision: str) -> None:
    """By tag, by pull request and by commit."""
    commit = online.commit(ID, "v2")
    path = hub.download(f"{ID}@{commit if revision == 'commit' else revision}")
    assert path.name == commit != online.commit(ID)
    with open_checkpoint(path) as checkpoint:
        (chunk,) = checkpoint.index.tensors["x"].chunks
        assert checkpoint.files.read_span(chunk.span) == torch.full((1024,), 2.0).numpy().tobytes()


def test_second_download_fetches_nothing(online: Hub) -> None:
    """The cache has it all; only the branch is looked up."""
    first = hub.download(ID)
    online.requests.clear()
    assert hub.download(ID) == first
    assert len(online.requests) == 1


def test_offline_after_a_download(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is enough, without a single request."""
    first = hub.download(ID)
    online.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.download(ID) == first
    assert online.requests == []


@pytest.mark.parametrize("text", [ID, f"{ID}@v2", f"{ID}@{'0' * 40}"])
def test_offline_without_the_cache(online: Hub, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Not the checkpoint's fault: exit code 6, with what to do."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFailedError, match="HF_HUB_OFFLINE") as caught:
        hub.download(text)
    assert caught.value.exit_code is ExitCode.ENVIRONMENT
    assert caught.value.next_step
    assert online.requests == []


def test_offline_with_part_of_it(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that was interrupted is not taken for a whole one."""
    (hub.download(ID) / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFailedError, match="only in part"):
        hub.download(ID)


def test_unknown_repository_and_revision(online: Hub) -> None:
    """Nothing there: exit code 4, and the message names both places that were looked at."""
    with pytest.raises(NotFoundError, match="no local path, and no model"):
        open_checkpoint("org/nothing")
    with pytest.raises(NotFoundError, match="no revision 'v3'"):
        open_checkpoint(f"{ID}@v3")


def test_gated_repository(online: Hub) -> None:
    """Says where to ask for access."""
    with pytest.raises(UsageError, match="must be granted") as caught:
        hub.download("org/gated")
    assert f"{online.endpoint}/org/gated" in caught.value.next_step


def test_repository_of_pickles(online: Hub) -> None:
    """They are not even downloaded."""
    with pytest.raises(UnsupportedError, match="no safetensors") as caught:
        hub.download("org/pickles")
    assert "org/pickles@refs/pr/N" in caught.value.next_step
    assert not any(".bin" in request for request in online.requests)


def test_mistral_layout(online: Hub) -> None:
    """consolidated.safetensors is taken where it is no copy of anything."""
    assert (hub.download("org/mistral") / "consolidated.safetensors").is_file()


def test_not_an_id() -> None:
    """Asked for directly."""
    with pytest.raises(UsageError, match="not a hub id"):
        hub.download("name")


def test_server_that_is_not_there(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port, for a branch and for a commit."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for text in (ID, f"{ID}@{'0' * 40}"):
        with pytest.raises(EnvironmentFailedError, match="cannot be downloaded") as caught:
            hub.download(text)
        assert "\n" not in caught.value.message


def test_connection_that_breaks(online: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file is not kept as a whole one; the next run fetches it."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)  # between its own retries
    online.cut_after = 500
    try:
        with pytest.raises(EnvironmentFailedError, match="cannot be downloaded"):
            hub.download(ID)
    finally:
        online.cut_after = None
    with open_checkpoint(ID) as checkpoint:
        assert checkpoint.index.problems == ()


def test_no_bars_in_a_log_file(
    online: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout ever; on stderr only where someone watches."""
    hub.download(ID)
    said = capsys.readouterr()
    assert said.out == ""
    assert "Fetching" not in said.err
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE + "-2")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    hub.download(ID)
    assert "Fetching" in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_settings_from_the_environment(served: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HUB_CACHE reach a process of their own, as a user would set them."""
    environment = os.environ | {
        "HF_ENDPOINT": served.endpoint, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"
    }  # fmt: skip
    program = "import sys; from ckptguard.formats.hub import download; print(download(sys.argv[1]))"
    command = [sys.executable, "-W", "error", "-c", program, f"{ID}@v2"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "cache" / "models--org--tiny" / "snapshots" / served.commit(ID, "v2"))
    assert "Fetching" not in done.stderr
