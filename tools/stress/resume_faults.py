"""Plants every fault of the matrix in a resumed Megatron run, and holds what is found against what has to be found.

    python tools/stress/resume_faults.py [--only NAME ...] [--sample N] [--keep FOLDER] [--write-page]

Every recipe has one reference and one save; every fault costs one more launch. Rows are kept in resume_faults.json beside this
file: a run of all faults writes docs/resume-faults.md from it, ``--write-page`` does so from the rows that are there. Exits 1
if a row is not as expected.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptguard.testing.resume_faults import FAULT_RECIPES, FAULTS, Fault
from ckptguard.testing.resume_matrix import Bench, Row, bench_for

RESULTS = Path(__file__).resolve().parents[2] / ".bench" / "resume_faults.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "resume-faults.md"
_SORTS = {
    "state": "State: something else is loaded than was saved",
    "compute": "Computation: equal state gives other values",
    "control": "Controls: nothing is wrong",
}
_HEADER = """# Faults planted in resumed runs

Each row is a real, small Megatron-LM run that is saved after step 2 and resumed to step 4, with one fault planted in the
resumed processes, in the checkpoint's files or in the launch. **First report** is what `ckptguard verify-resume` names first;
the run is compared value by value with one that was not interrupted. The last two columns say what two other methods would
have seen in the same processes, and when: losses rounded to five decimals, as Megatron-LM's functional tests compare them, and
`torch.hash_tensor` of every tensor that ckptguard compares. A dash is nothing.

This page is written by `tools/stress/resume_faults.py`, from its own runs; it is not edited by hand.
"""
_FOOTER = """
Faults marked *stand-in* act on a state in Transformer Engine's form that a test module keeps, since the runs are made on CPUs.
`ep-rng-of-rank-0` and `router-bias-cache` need nothing planted: they are what the installed Megatron does.
"""


def main() -> int:
    """Run what is asked for, keep the rows, and say how many are not as expected."""
    chosen = _arguments()
    kept = read_rows()
    faults = _chosen(chosen)
    if not chosen.write_page:
        with tempfile.TemporaryDirectory() as scratch:
            folder = (chosen.keep or Path(scratch)).absolute()
            kept |= {row.name: row for row in run(faults, folder)}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(
            json.dumps([dataclasses.asdict(kept[name]) for name in FAULTS if name in kept], indent=1) + "\n"
        )
    if chosen.write_page or len(faults) == len(FAULTS):
        PAGE.write_text(page(kept))
    wrong = [fault.name for fault in faults if fault.name not in kept or kept[fault.name].problem]
    print(f"{len(faults)} faults, {len(wrong)} not as expected{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


def run(faults: Sequence[Fault], folder: Path) -> Iterator[Row]:
    """Rows of faults, recipe by recipe, printed as they come."""
    for recipe in FAULT_RECIPES:
        mine = [fault for fault in faults if fault.recipe == recipe]
        bench: Bench | None = None
        for fault in mine:
            bench = bench or bench_for(fault, mine, folder)
            since = time.monotonic()
            row = bench.row(fault)
            print(
                f"{fault.name:24} {_told(row)}  {time.monotonic() - since:.0f} s  {row.problem or 'as expected'}",
                flush=True,
            )
            yield row


def read_rows() -> dict[str, Row]:
    """The rows that are kept, by name; those of faults that are no more are left out."""
    if not RESULTS.exists():
        return {}
    fields = [dict(row) for row in json.loads(RESULTS.read_text())]
    return {f["name"]: Row(**f | {"excused": tuple(f["excused"])}) for f in fields if f["name"] in FAULTS}


def page(rows: Mapping[str, Row]) -> str:
    """The page in docs."""
    out = [_HEADER]
    for sort, title in _SORTS.items():
        out += [f"\n## {title}\n", "| Fault | What it does | Run | First report | Blamed | Losses | `hash_tensor` |"]
        out.append("|---|---|---|---|---|---|---|")
        for fault in FAULTS.values():
            if fault.sort == sort and fault.name in rows:
                out.append(_line(fault, rows[fault.name]))
    return "\n".join(out) + "\n" + _FOOTER


def _line(fault: Fault, row: Row) -> str:
    recipe = FAULT_RECIPES[fault.recipe]
    ran = row.answer not in ("not run", "refused")
    blamed = f"`{row.module}` `{row.operation}`" if row.operation else f"`{row.module}`" if row.module else "-"
    others = [row.loss or "-", row.hashes or "-"] if ran else ["", ""]
    size = f"{fault.recipe}, {recipe.world_size} rank{'s' * (recipe.world_size > 1)}"
    cells = [
        f"`{fault.name}`",
        fault.what,
        size,
        _told(row),
        blamed if fault.sort == "compute" and ran else "",
        *others,
    ]
    problem = f" **not as expected: {row.problem}**" if row.problem else ""
    return "| " + " | ".join(cells) + f" |{problem}"


def _told(row: Row) -> str:
    if row.answer == "loaded":
        return f"loaded, rank {row.rank}: {row.item}"
    if row.answer == "step":
        return f"step {row.step}, rank {row.rank}: {row.item}"
    if row.answer == "refused":
        return "refused before anything starts"
    return f"explained: {', '.join(row.excused)}" if row.answer == "explained" else row.answer


def _chosen(arguments: argparse.Namespace) -> list[Fault]:
    faults = [FAULTS[name] for name in arguments.only] or list(FAULTS.values())
    if arguments.sample is not None:
        faults = random.Random(arguments.seed).sample(faults, min(arguments.sample, len(faults)))
    return faults


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", choices=FAULTS, help="these faults")
    parser.add_argument("--sample", type=int, metavar="N", help="this many of them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the arms recorded and saved")
    parser.add_argument("--write-page", action="store_true", help="run nothing, write the page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
