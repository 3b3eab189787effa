"""Clean runs: saved, resumed, and proved equal by ``verify-resume``'s own code. Any difference is a false alarm.

    python tools/stress/resume_clean.py [--runs N] [--keep FOLDER]

Runs go through the recipes below in turn; each has its own seed, and its own reference, save and resume. Expert parallelism
over more than one rank is not among them: Megatron 0.19.2 does not come back from it (``ep-rng-of-rank-0`` in
``resume_faults.py``). Exits 1 on any false alarm or failed run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from ckptguard.resume.verifying import Options, verify
from ckptguard.testing.recipes import Recipe
from ckptguard.testing.resume_faults import FAULT_RECIPES
from ckptguard.testing.resume_matrix import STEPS, request_for

_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
_OWN_RED = ("moe-ep2", "moe-biased")  # what Megatron 0.19.2 cannot resume
RECIPES = (
    *(recipe for name, recipe in FAULT_RECIPES.items() if name not in _OWN_RED),
    Recipe(name="tp2-pp2", tp=2, pp=2, extra_flags=_DROPOUT),
    Recipe(name="hybrid", model="hybrid"),
    Recipe(name="hybrid-dropout", model="hybrid", extra_flags=_DROPOUT),
    Recipe(name="fully-reshardable", num_layers=2, optimizer_format="fully_reshardable"),
    Recipe(name="legacy", num_layers=2, ckpt_format="torch", extra_flags=("--ckpt-format", "torch")),
    Recipe(name="fp32", num_layers=2, dtype="fp32", optimizer_format="fully_reshardable"),
    Recipe(name="moe-dropout", model="moe", num_layers=2, extra_flags=_DROPOUT),
)


def main() -> int:
    """Run and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the arms recorded and saved")
    chosen = parser.parse_args()
    alarms = 0
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(chosen.runs):
            recipe = dataclasses.replace(RECIPES[number % len(RECIPES)], seed=1234 + number, steps=STEPS)
            folder = (chosen.keep or Path(scratch)).absolute() / f"{number:02d}-{recipe.name}"
            since = time.monotonic()
            found = verify(request_for(recipe, folder), Options(load=False, narrow=False))
            alarms += found.word != "equal"
            values = sum(comparison.values for comparison in found.comparisons)
            print(
                f"{number + 1:3} {recipe.name:20} {recipe.world_size} ranks  {found.word}, {values:,} values,"
                f" {time.monotonic() - since:.0f} s{'' if found.word == 'equal' else ': ' + found.sentence}",
                flush=True,
            )
    print(f"{chosen.runs} clean runs of {min(chosen.runs, len(RECIPES))} recipes, {alarms} false alarms")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
