"""Helpers of the damage tests: sealed copies of the small real checkpoints, and what verify says of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptguard.engine.seal import seal
from ckptguard.engine.verify import Report, verify
from ckptguard.formats.registry import open_checkpoint

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19"
DENSE = FIXTURES / "dense_tp2pp2_dp_reshardable" / "iter_0000004"
MOE = FIXTURES / "moe_pp2ep2_fully_reshardable" / "iter_0000004"
LEGACY = FIXTURES / "dense_tp2pp2_legacy_torch" / "iter_0000004"


def copy_of(source: Path, to: Path) -> Path:
    """A writable copy."""
    shutil.copytree(source, to)
    for path in [to, *to.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to


def sealed_copy(source: Path, to: Path) -> tuple[Path, str]:
    """A sealed copy and its seal."""
    copy_of(source, to)
    with open_checkpoint(to) as checkpoint:
        return to, seal(checkpoint).seal


def damage_of(path: Path, **options: object) -> tuple[Report, set[str]]:
    """The report and the kinds of damage in it."""
    report = verify(path, **options)  # type: ignore[arg-type]
    return report, {p.kind for p in report.problems if p.is_damage}
