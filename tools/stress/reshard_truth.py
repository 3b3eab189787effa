"""Hold ``ckptguard reshard`` against Megatron itself, layout pair by layout pair.

One state, saved by Megatron in the first layout, is resharded to the second one from and to both forms of optimizer state.
Of each pair it is checked that

* *files*: names, chunks, order and elements of our files are those that Megatron writes in that layout;
* *ways*: in one layout, each form of optimizer state made from the other is what Megatron writes;
* *loads*: processes of Megatron in the second layout hold the same state, bit for bit, on every rank, whether they load what
  Megatron saved in the first layout or what we made of it;
* *steps*: two more training steps give the same losses and gradient norms, and in the end the same checkpoint.

    python tools/stress/reshard_truth.py [--keep FOLDER] [PAIR ...]

Prints one line per pair, and below it what differs; exits 1 if anything does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptguard.testing import reshard_truth as truth
from ckptguard.testing.recipes import MegatronRunError, OptimizerFormat, Recipe, check_loads, make_checkpoint, resave
from ckptguard.testing.reshard_truth import FORMS, PAIRS, Pair, form, reshard_flags
from ckptguard.testing.state_digests import TRAINER, Resumed, differences, resume_digested

FULL, BUCKETS = FORMS
_SECONDS = 900.0
_HOW: dict[str, Any] = {"trainer": TRAINER, "timeout_seconds": _SECONDS}


class Trial:
    """One pair, in a folder of its own."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair, self.folder = pair, folder
        self.found: dict[str, list[str]] = {}
        self.remarks: list[str] = []

    def run(self) -> None:
        """Make everything and hold it against each other."""
        own = {FULL: self.folder / "before_full", BUCKETS: self.folder / "before_dp"}
        make_checkpoint(form(self.pair.before, FULL), own[FULL], **_HOW)
        resave(own[FULL], form(self.pair.before, BUCKETS), own[BUCKETS], **_HOW)
        self._ways(own)
        ours = {
            (source, target): self._reshard(own[source], f"{source}-{target}", self.pair.after, target)
            for source in FORMS
            for target in FORMS
        }
        direct = self._resumed(own[FULL], "direct")
        known = own[FULL] if direct else ours[BUCKETS, FULL]
        theirs = self._files(known, ours)
        if direct is None:
            direct = self._by_resave(own[FULL], ours)
        runs = [self._resumed(ours[BUCKETS, target], f"from_{target}", theirs[target]) for target in FORMS]
        self._runs(direct, runs)

    def _reshard(self, source: Path, name: str, recipe: Recipe, optimizer: OptimizerFormat) -> Path:
        out = self.folder / name
        command = [
            sys.executable,
            "-m",
            "ckptguard",
            "reshard",
            str(source),
            str(out),
            *reshard_flags(recipe, optimizer),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        return out

    def _ways(self, own: dict[OptimizerFormat, Path]) -> None:
        self.found["ways"] = []
        for source, target in ((FULL, BUCKETS), (BUCKETS, FULL)):
            made = self._reshard(own[source], f"way-{target}", self.pair.before, target)
            self.found["ways"] += truth.other_bytes(made, own[target]) + truth.other_objects(made, own[target])

    def _files(
        self, known: Path, ours: dict[tuple[OptimizerFormat, OptimizerFormat], Path]
    ) -> dict[OptimizerFormat, Path]:
        self.found["files"] = []
        out = {}
        for target in FORMS:
            recipe = form(self.pair.after, target, shared_out=False)
            theirs = out[target] = self.folder / recipe.name
            resave(known, recipe, theirs, **_HOW)
            for source in FORMS:
                made = ours[source, target]
                for check in (truth.other_files, truth.other_bytes, truth.other_objects):
                    self.found["files"] += check(made, theirs)
        return out

    def _resumed(self, source: Path, name: str, theirs: Path | None = None) -> Resumed | None:
        """A run from a checkpoint, or None if Megatron refuses its own: the source, or theirs in its stead."""
        try:
            return resume_digested(source, form(self.pair.after, FULL), self.folder / name, timeout_seconds=_SECONDS)
        except MegatronRunError as error:
            if theirs and _loads(theirs, self.pair.after):
                raise
            words = [line for line in str(error).splitlines() if "Error" in line]
            self.remarks.append(
                f"{name}: Megatron refuses its own save in the new layout: {words[-1] if words else error}"
            )
            return None

    def _by_resave(self, own: Path, ours: dict[tuple[OptimizerFormat, OptimizerFormat], Path]) -> None:
        """Without a direct load: what Megatron loaded from our files, saved at once, has the fingerprints of its first save."""
        self.found["resaved"] = []
        for target in FORMS:
            out = self.folder / f"resaved-{target}"
            resave(ours[BUCKETS, target], form(self.pair.after, FULL), out, **_HOW)
            self.found["resaved"] += _diff(own, out)

    def _runs(self, direct: Resumed | None, runs: list[Resumed | None]) -> None:
        known, *others = [run for run in (direct, *runs) if run is not None]
        self.found["loads"], self.found["steps"] = [], []
        for run in others:
            self.found["loads"] += differences(replace(known, steps=()), replace(run, steps=()))
            self.found["steps"] += differences(replace(known, loaded=()), replace(run, loaded=()))
            self.found["steps"] += _diff(known.saved, run.saved)


def _loads(checkpoint: Path, recipe: Recipe) -> bool:
    """Whether Megatron loads it."""
    try:
        check_loads(checkpoint, form(recipe, FULL), timeout_seconds=_SECONDS)
    except MegatronRunError:
        return False
    return True


def _diff(one: Path, other: Path) -> list[str]:
    """What ``ckptguard diff`` says of two checkpoints, if it does not find them equal."""
    command = [sys.executable, "-m", "ckptguard", "diff", str(one), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [f"diff {one} {other}: {done.stdout[-2000:]}{done.stderr[-500:]}"] if done.returncode else []


def main() -> int:
    """Try the pairs that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=", ".join(PAIRS))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep everything there")
    asked = parser.parse_args()
    bad = 0
    for name in asked.pairs or PAIRS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (asked.keep or Path(temporary)) / name
            folder.mkdir(parents=True)
            begun, trial = time.monotonic(), Trial(PAIRS[name], folder)
            try:
                trial.run()
            except (MegatronRunError, RuntimeError) as error:
                trial.found["broken off"] = [str(error)]
        verdicts = ", ".join(f"{what} {len(found) or 'equal'}" for what, found in trial.found.items())
        print(f"{name}: {verdicts}; {time.monotonic() - begun:.0f} s", flush=True)
        for line in (*trial.remarks, *(f"{w}: {f}" for w, found in trial.found.items() for f in found[:4])):
            print(f"    {line}", flush=True)
        bad += any(trial.found.values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
