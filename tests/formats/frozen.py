"""The frozen checkpoints in ``fixtures/``, some of which are committed as archives."""

from __future__ import annotations

import tarfile
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
NAMES = sorted(str(p.parent.relative_to(FIXTURES)) for p in FIXTURES.rglob("expected.json"))


def unpacked(name: str, into: Path) -> Path:
    """Return the root (iteration folder and tracker) of a frozen checkpoint.

    Args:
        name: Such as ``megatron-0.14/dense_tp2pp2_model_space``.
        into: A folder for archives, which are unpacked there once; other checkpoints stay where they are.
    """
    archive = FIXTURES / name / "checkpoint.tar.xz"
    if not archive.exists():
        return FIXTURES / name
    root = into / name
    if not root.exists():
        with tarfile.open(archive) as content:
            content.extractall(root, filter="data")
    return root
