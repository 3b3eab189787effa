"""Words for what a verification found, shared by the screen and the page of ``verify-resume``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise

import click

from ckptguard.core.watching import GROUPS, Group
from ckptguard.resume.records import Kind
from ckptguard.resume.results import ArmRun, Comparison, Difference, Verification

MOMENTS: dict[Kind, str] = {
    "loaded": "state as loaded after step",
    "step": "step",
    "saved": "state as saved after step",
}
_DIGEST = re.compile(r"(?P<digest>#(?:b3:)?[0-9a-f]{8})[0-9a-f]{24}(?: (?P<kind>\S+\[[^]]*\])(?: (?P<number>.+))?)?")


def printable(text: str) -> str:
    """The text without the control characters that logs hold: a terminal would obey them, a page may not hold them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " for c in click.unstyle(text).replace("\t", "    "))


def decisive(verification: Verification) -> Comparison | None:
    """The first comparison in which something differs; None if nothing does."""
    return next((c for c in verification.comparisons if c.first is not None), None)


def moment(difference: Difference) -> str:
    """``step 11, rank 3``."""
    return f"{MOMENTS[difference.kind]} {difference.step}, rank {difference.rank}"


def numbers(values: Iterable[int]) -> str:
    """``0 to 2, 5``: ascending, without repeats."""
    ordered = sorted(set(values))
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1), len(ordered)]
    runs = [ordered[a:b] for a, b in pairwise(cuts) if a < b]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0 to 2, 5``."""
    found = set(ranks)
    return f"rank{'' if len(found) == 1 else 's'} {numbers(found)}"


def steps_text(steps: tuple[int, int]) -> str:
    """``step 10`` or ``steps 11 to 20``."""
    return f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"


def value_text(value: object, most: int = 72) -> str:
    """A recorded value in short: the number first where there is one, of a digest its first eight digits."""
    if value is None:
        return "absent"
    text = printable(value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str))
    if found := _DIGEST.fullmatch(text):
        digest, kind, number = found["digest"], found["kind"], found["number"]
        text = " ".join(filter(None, [number, f"{digest}…", kind]))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def counts(pairs: Iterable[tuple[str, int]]) -> str:
    """``gradient 28, parameter 28``."""
    return ", ".join(f"{name} {count:,}" for name, count in pairs)


def differing(comparison: Comparison) -> list[tuple[Group, int]]:
    """Groups that differ at the first difference, with how many values do, in the order in which a step touches them."""
    found = [d.group for d in comparison.at_first]
    return [(group, found.count(group)) for group in GROUPS if group in found]


def answer(comparison: Comparison) -> str:
    """What a comparison found, in a few words."""
    first = comparison.first
    if first is None:
        return "equal"
    return "different" if comparison.steps[0] == comparison.steps[1] else f"different from step {first.step} on"


def ending(arm: ArmRun) -> str:
    """How an arm ended."""
    return "stopped by the clock" if arm.exit_code is None else f"exit {arm.exit_code}"
