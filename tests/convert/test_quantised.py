"""fp8 weights whose scales are kept by import are given back bit for bit by export, as long as nobody changed them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptguard.cli.main import run
from ckptguard.formats.registry import open_checkpoint

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("quick")]
LAYOUT = ["--tp", "2", "--ep", "2", "--etp", "1"]


@pytest.fixture
def kept(snapshot: Callable[[str], Path], tmp_path: Path) -> Path:
    root = tmp_path / "megatron"
    assert run(["import", str(snapshot("deepseek_v3_fp8")), str(root), *LAYOUT, "--fp8", "keep"]) == 0
    return root


def test_fp8_comes_back(kept: Path, snapshot: Callable[[str], Path], tmp_path: Path) -> None:
    source, back = snapshot("deepseek_v3_fp8"), tmp_path / "back"
    assert run(["export", str(kept), str(back), "--reference", str(source), "--fp8", "restore"]) == 0
    assert run(["diff", str(source), str(back)]) == 0
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_a_trained_weight_is_not_pressed_into_its_old_scales(
    kept: Path, snapshot: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_checkpoint(kept) as checkpoint:
        entry = checkpoint.index.tensors["decoder.layers.0.self_attention.linear_proj.weight"]
        at = checkpoint.reader.locate(entry, entry.chunks[0])
    with (kept / "release" / at.span.file).open("r+b") as file:
        file.seek(at.span.offset_bytes)
        file.write(bytes([file.read(1)[0] ^ 1]))
    more = ["--reference", str(snapshot("deepseek_v3_fp8"))]
    assert run(["export", str(kept), str(tmp_path / "no"), *more, "--fp8", "restore"]) == 5
    assert "no longer what their kept scales give" in capsys.readouterr().err
    assert run(["export", str(kept), str(tmp_path / "yes"), *more]) == 0


def test_without_kept_scales_there_is_nothing_to_restore(
    snapshot: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, root = str(snapshot("deepseek_v3_fp8")), tmp_path / "megatron"
    assert run(["import", source, str(root), *LAYOUT]) == 0
    assert run(["export", str(root), str(tmp_path / "no"), "--reference", source, "--fp8", "restore"]) == 2
    assert "--fp8 keep" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
