"""From "these arms differ" to what is to blame: short reruns that look closer, or that put single items right.

Two questions, two ways. Where the *loaded* state differs already, items are put right after loading, first all of them, then
fewer, until the run is equal again: the smallest set that is needed is to blame. Where the loaded state is equal and a *step*
differs, both arms run that step again and record module calls, then the operations inside the module that gets the same and
gives something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ckptguard.core.wording import some
from ckptguard.resume.arm_lines import ArmLine, Role
from ckptguard.resume.call_compare import Located, first_fault
from ckptguard.resume.compare import compare_steps
from ckptguard.resume.excuses import RULES
from ckptguard.resume.results import Comparison, Culprit, Difference
from ckptguard.resume.session import ArmFailedError, Session

Rerun = Callable[[Role, str, str, int], ArmLine]  # role, name, purpose, last step
MOST_TRIALS = 12
_SHOWN = 3  # items of a set in a sentence
KEEPING = "save (keeping values)"
_GIVEN = ("batch", "rng at begin")  # what a step begins with: no module made it
_OPTIMIZER = ("master", "optimizer", "parameter")  # what an optimizer makes of equal gradients


# ---- a step that differs although what was loaded is equal ----


def narrow_step(
    session: Session,
    rerun: Rerun,
    steps: Comparison,
    other: Role = "resume",
    put_right: Mapping[str, Any] | None = None,
) -> tuple[Culprit, ...]:
    """Names the module and the operation in it that first give something else from the same.

    Args:
        session: Arms already run, and where new ones go.
        rerun: Makes the line of a rerun.
        steps: The comparison that found a difference.
        other: Which arm departs: ``resume``, or ``reference`` where the run is not deterministic at all.
        put_right: Fields of the other arm's order that put right what was loaded wrong.

    Returns:
        From the wider to the narrower; empty if nothing could be named, which the chain then says.
    """
    first = steps.first
    assert first is not None
    if first.group in _GIVEN:
        session.say(
            f"Step {first.step} already begins with another {first.item}: what it computes from there cannot agree."
        )
        why = "The state after loading agrees and the step begins with another value: something used it up in between."
        return (Culprit("state", first.rank, first.step, first.item, why),)
    located = locate(steps, partial(_look, session, rerun, first.step, other, put_right or {}))
    if located is None:
        session.say(
            f"In the reruns of step {first.step} all recorded calls agree: the difference did not come again, or its cause is "
            "not a call of a module."
        )
        return ()
    return located.culprits()


def locate(steps: Comparison, look: Callable[[str | None], Located | None]) -> Located | None:
    """What is to blame for a step that differs: modules first, then the operations of the one that is found.

    Args:
        steps: The comparison that found the difference.
        look: Compares calls of modules (None), or those of the operations in a scope as an ``Order`` names it.
    """
    assert steps.first is not None
    if steps.first.group in _OPTIMIZER and not _differs(steps, "gradient"):
        return look("optimizer")
    located = look(None)
    scope = "collectives"  # what no module did, ranks did among themselves
    if located is not None and located.is_certain:
        if located.fault.sort in ("state", "batch"):
            return located
        scope = located.module
    closer = look(scope)
    return closer if closer is not None and (closer.is_certain or located is None) else located


def _differs(comparison: Comparison, group: str) -> bool:
    return any(difference.group == group for difference in comparison.at_first)


def _look(
    session: Session, rerun: Rerun, step: int, other: Role, put_right: Mapping[str, Any], scope: str | None
) -> Located | None:
    """Runs one step of both arms again, closer, and compares the calls."""
    level, what = ("module", "modules") if scope is None else ("op", f"operations in {scope}")
    order = {"level": level, "calls": (step, step), "scope": scope}
    try:
        one = session.run(
            rerun("reference", f"reference ({what})", f"step {step} again, with its {what}", step), **order
        )
        two = session.run(
            rerun(
                other,
                f"{other} ({what}{', again' if other == 'reference' else ''})",
                f"step {step} again, with its {what}",
                step,
            ),
            **order,
            **put_right,
        )
    except ArmFailedError as error:
        session.say(f"A rerun that records {what} failed: {error.run.problem}")
        return None
    located = first_fault(one, two)
    for sentence in located.evidence if located is not None else ():
        session.say(sentence)
    return located


# ---- a loaded state that differs ----


def narrow_state(session: Session, rerun: Rerun, loaded: Comparison, steps: Comparison) -> tuple[Culprit, ...]:
    """Names the items of the loaded state that make the run differ, by putting them right one set at a time.

    Args:
        session: Arms already run, and where new ones go.
        rerun: Makes the line of a rerun.
        loaded: What was loaded against what was saved; it differs.
        steps: The steps after the resume against the reference; they differ.
    """
    items = _items(loaded.at_first)
    gone = _items(difference for difference in loaded.at_first if difference.other is None)
    if gone:  # nothing is there that could be put right
        session.say(f"Saved, and gone after loading: {some(gone, _SHOWN)}.")
        return (_named(loaded, gone, "It was saved, and nothing of it is there after loading."),)
    try:
        keeping = rerun("save", KEEPING, f"the save again, keeping the values of {_counted(items)}", loaded.steps[0])
        session.run(keeping, keep=items)
        trials = _Trials(session, rerun, steps, keeping.folder)
        if not trials.equal_with(items):
            session.say(
                f"With {_counted(items)} put right after loading the run still differs: something else is wrong too."
            )
            return narrow_step(session, rerun, trials.last, put_right=trials.order(items))
        session.say(f"With {_counted(items)} put right after loading, step {trials.step} is equal.")
        needed = smallest(items, trials.equal_with, MOST_TRIALS)
    except ArmFailedError as error:
        session.say(f"A rerun that puts items right failed: {error.run.problem}")
        return ()
    why = f"Put right alone, step {trials.step} is equal"
    if len(needed) < len(items):
        session.say(f"The smallest set found that is enough: {some(needed, _SHOWN)}.")
        why += f"; the other {len(items) - len(needed)} items that differ do not reach it"
    return (_named(loaded, needed, f"{why}."),)


class _Trials:
    """Resumes with some items put right, up to the step that differed."""

    def __init__(self, session: Session, rerun: Rerun, steps: Comparison, kept: str) -> None:
        assert steps.first is not None
        self.session, self.rerun, self.step, self.last = session, rerun, steps.first.step, steps
        self._steps, self._kept, self._count = (steps.steps[0], steps.first.step), kept, 0

    def order(self, items: Sequence[str]) -> dict[str, Any]:
        """Fields of an order that put these items right."""
        return {"restore": tuple(items), "restore_from": self._kept}

    def equal_with(self, items: Sequence[str]) -> bool:
        """Whether the run is equal to the reference when these items hold what was saved; ``last`` is the comparison."""
        self._count += 1
        purpose = f"resumed with {some(items, _SHOWN)} put right"
        line = self.rerun("resume", f"resume (trial {self._count})", purpose, self.step)
        records = self.session.run(line, **self.order(items))
        reference = self.session.records["reference"]
        self.last = compare_steps("reference", reference, line.name, records, self._steps, purpose, RULES)
        return self.last.first is None


def smallest(items: Sequence[str], enough: Callable[[Sequence[str]], bool], most: int) -> tuple[str, ...]:
    """A small set of items that is enough, by halving (delta debugging), within a number of trials.

    Args:
        items: A set that is enough.
        enough: Asks of a set; every question costs a run.
        most: How many questions may be asked.

    Returns:
        The smallest set found; with questions left, no item of it can be left out.
    """
    needed, parts, asked = list(items), 2, 0
    while len(needed) > 1 and asked < most:
        chunks = [needed[len(needed) * i // parts : len(needed) * (i + 1) // parts] for i in range(parts)]
        candidates = (
            chunks if parts == 2 else [*chunks, *([x for c in chunks if c is not chunk for x in c] for chunk in chunks)]
        )
        for candidate in candidates:
            asked += 1
            if enough(candidate):
                needed, parts = candidate, 2
                break
            if asked >= most:
                break
        else:
            if parts >= len(needed):
                break
            parts = min(len(needed), parts * 2)
    return tuple(needed)


def _items(differences: Iterable[Difference]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(difference.item for difference in differences))


def _named(loaded: Comparison, items: Sequence[str], why: str) -> Culprit:
    first = next(difference for difference in loaded.at_first if difference.item in set(items))
    return Culprit("state", first.rank, first.step, some(items, _SHOWN), why)


def _counted(items: Sequence[str]) -> str:
    return f"all {len(items)} items" if len(items) > 1 else items[0]
