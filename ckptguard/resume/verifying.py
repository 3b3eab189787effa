"""The whole proof: which arms run, what is compared with what, and when to look closer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptguard.core.watching import GROUPS, Group
from ckptguard.resume.arm_lines import ArmLine, Request, Role, plan_arms, plan_rerun
from ckptguard.resume.compare import compare_loaded, compare_steps
from ckptguard.resume.diagnoses import describe, number
from ckptguard.resume.excuses import RULES
from ckptguard.resume.known_faults import recognise
from ckptguard.resume.narrowing import narrow_state, narrow_step
from ckptguard.resume.orders import Level
from ckptguard.resume.placed import compare_placed
from ckptguard.resume.results import Comparison, Culprit, Curve, KnownFault, Setting, Verification, Word
from ckptguard.resume.session import ArmFailedError, Listener, Plant, Records, Session

MOST_DIFFERENCES = 20_000  # per comparison in a report; the streams of the arms hold all
_CURVES = ("loss", "metric")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How thoroughly.

    Attributes:
        repeat: Run the reference twice.
        load: Run an arm that only loads.
        narrow: Look closer when something differs.
        level: How much is recorded.
        timeout_seconds: For each arm.
        plant: A fault to plant, for demonstrations and tests.
    """

    repeat: bool = False
    load: bool = True
    narrow: bool = True
    level: Level = "state"
    timeout_seconds: float = 3600.0
    plant: Plant | None = None


def verify(
    request: Request, options: Options, settings: Sequence[Setting] = (), listener: Listener | None = None
) -> Verification:
    """Runs the arms, compares them, and narrows what differs.

    Args:
        request: Which run, how many steps, saved when.
        options: How thoroughly.
        settings: Determinism settings that are not as they should be, for the report.
        listener: Hears how it goes.

    Raises:
        UsageError: The line or the steps make no sense.
        EnvironmentFailedError: An arm ended well and recorded too little to be compared.
    """
    session = Session(
        options.level,
        options.timeout_seconds,
        bool(request.resume_args),
        options.plant,
        listener or Listener(),
    )
    lines = {line.role: line for line in plan_arms(request, repeat=options.repeat, load=options.load)}
    proof = _Proof(request, options, session, lines)
    try:
        proof.run()
    except ArmFailedError as error:
        proof.fail(error)
    return proof.verification(settings)


class _Proof:
    """One verification under way. Every method that runs arms may raise ``ArmFailedError``."""

    def __init__(self, request: Request, options: Options, session: Session, lines: Mapping[Role, ArmLine]) -> None:
        self.request, self.options, self.session, self.lines = request, options, session, lines
        self.word: Word = "equal"
        self.sentence = ""
        self.comparisons: list[Comparison] = []
        self.culprits: tuple[Culprit, ...] = ()

    def run(self) -> None:
        """All arms, in order, as far as it makes sense."""
        first, last = self.request.start + 1, self.request.start + self.request.steps
        saved = self.request.resumed_at
        self.session.run(self.lines["reference"])
        if "repeat" in self.lines and not self._deterministic(
            "repeat", (first, last), "Is the run the same when nothing is interrupted?"
        ):
            return
        if not self._deterministic("save", (first, self.request.last_save), "Is it the same up to the save?"):
            return
        if "load" in self.lines:
            self.session.run(self.lines["load"])
        self.session.run(self.lines["resume"])
        if self._layout_changed():
            self._compare_layouts(saved)
        else:
            self._compare_resumed(saved, last)

    def _deterministic(self, role: Role, steps: tuple[int, int], question: str) -> bool:
        """Runs an arm that repeats steps of the reference; whether it is equal."""
        records = self.session.run(self.lines[role])
        compared = self._steps(role, records, steps, question)
        first = compared.first
        if first is None:
            return True
        saves = [step for step in self.lines["save"].saves if step < first.step]
        if role == "save" and saves:
            self.word = "different"
            self.sentence = (
                f"Saving changes the run: after the save at step {saves[-1]}, step {first.step} differs from a run that did "
                f"not save, first in {first.item} of rank {first.rank}."
            )
        else:
            self.word = "not deterministic"
            self.sentence = (
                f"The same run twice is not the same: step {first.step} differs first in {first.item} of rank {first.rank}. "
                "Nothing can be said about a resume before that is put right."
            )
        self.session.say(self.sentence)
        if self.options.narrow:
            self.culprits = narrow_step(self.session, self._rerun, compared, "reference")
        return False

    def _compare_resumed(self, saved: int, last: int) -> None:
        """The resumed run against the reference, and what was loaded against what was saved."""
        records = self.session.records
        steps = self._steps(
            "resume", records["resume"], (saved + 1, last), "Does the resumed run go on as the uninterrupted one?"
        )
        arms = [name for name in ("load", "resume") if name in records]
        loads = [
            compare_loaded(
                "save",
                records["save"],
                name,
                records[name],
                saved,
                f"Does arm {name!r} load what was saved?",
                RULES,
                steps,
            )
            for name in arms
        ]
        self.comparisons[-1:-1] = loads  # in the order in which things happen
        loaded = loads[-1]
        for comparison, when in (
            (loaded, f"Loaded after step {saved}"),
            (steps, f"Step {steps.first.step if steps.first else 0}"),
        ):
            if comparison.first is not None:
                for sentence in describe(comparison, records[comparison.one], records[comparison.other]):
                    self.session.say(f"{when}: {sentence}")
        if loaded.first is None and loads[0].first is not None:
            self.session.say(
                "One of two processes that load the same checkpoint gets another state: loading is not deterministic."
            )
            loaded = loads[0]
        if loaded.first is None and steps.first is None:
            self.sentence = (
                f"Saved after step {saved} and resumed, the run is equal to the uninterrupted one up to step {last}: "
                f"{steps.values:,} values on {steps.ranks} rank{'s' * (steps.ranks != 1)}."
            )
            return
        self.word, self.sentence = "different", _verdict(loaded, steps, saved, last)
        if self.options.narrow:
            self.culprits = self._narrow(loaded, steps)

    def _narrow(self, loaded: Comparison, steps: Comparison) -> tuple[Culprit, ...]:
        if steps.first is None:
            assert loaded.first is not None
            self.session.say(f"No step up to {steps.steps[1]} is changed by it.")
            return (
                Culprit(
                    "state",
                    loaded.first.rank,
                    loaded.first.step,
                    loaded.first.item,
                    "It was not loaded as it was saved.",
                ),
            )
        if loaded.first is None:
            self.session.say("What was loaded is what was saved: the difference is made after loading.")
            return narrow_step(self.session, self._rerun, steps)
        return narrow_state(self.session, self._rerun, loaded, steps)

    def _compare_layouts(self, saved: int) -> None:
        """Under another layout sums are made in another order, so only what was loaded can be held to be equal."""
        records = self.session.records
        compared = compare_placed(
            "save",
            records["save"],
            "resume",
            records["resume"],
            saved,
            "Is the state that was loaded under another layout the one that was saved?",
        )
        self.comparisons.append(compared)
        self.session.say(
            "The resumed run has another layout: reductions run in another order there, so its steps are shown and not judged."
        )
        if compared.first is None:
            self.sentence = (
                f"Under the other layout the state loaded is the one saved after step {saved}, bit for bit: "
                f"{compared.values:,} tensors."
            )
        else:
            self.word = "different"
            self.sentence = f"Under the other layout {compared.first.item} is not what was saved after step {saved}."

    def _layout_changed(self) -> bool:
        one, two = (_facts(self.session.records[name]) for name in ("save", "resume"))
        return any(one.get(key) != two.get(key) for key in ("world_size", "sizes"))

    def _steps(self, name: str, records: Records, steps: tuple[int, int], question: str) -> Comparison:
        reference = self.session.records["reference"]
        self.comparisons.append(compare_steps("reference", reference, name, records, steps, question, RULES))
        return self.comparisons[-1]

    def _rerun(self, role: Role, name: str, purpose: str, last_step: int) -> ArmLine:
        return plan_rerun(self.request, role, name=name, purpose=purpose, end=last_step - self.request.start)

    def fail(self, error: ArmFailedError) -> None:
        """An arm did not do what was asked: that is the verdict."""
        self.word, self.sentence = "failed", f"Arm {error.run.name!r} failed: {error.run.problem}"

    def verification(self, settings: Sequence[Setting]) -> Verification:
        """All of it as a value."""
        records = self.session.records
        reference = records.get("reference", {})
        return Verification(
            word=self.word,
            sentence=self.sentence,
            steps=self.request.start + self.request.steps,
            saved_at=tuple(self.request.start + step for step in self.request.save_at),
            facts=_facts(reference),
            settings=tuple(settings),
            arms=tuple(self.session.runs),
            comparisons=tuple(_bounded(comparison) for comparison in self.comparisons),
            culprits=self.culprits,
            chain=tuple(self.session.chain),
            known=self._known(),
            curves=tuple(curve for role in self.lines if role in records for curve in curves(role, records[role])),
            unobserved=_unobserved(records),
            observed=_observed(reference),
            stored_bytes_per_rank_step=_bytes_per_step(reference),
        )

    def _known(self) -> tuple[KnownFault, ...]:
        facts = _facts(self.session.records.get("reference", {}))
        return recognise(self.comparisons, self.session.records, facts, facts.get("versions", {}))


def _verdict(loaded: Comparison, steps: Comparison, saved: int, last: int) -> str:
    if loaded.first is not None:
        first = loaded.first
        items = len({difference.item for difference in loaded.at_first})
        others = f" and {items - 1} more item{'s' * (items != 2)}" if items > 1 else ""
        then = f"the run differs from step {steps.first.step} on" if steps.first else f"no step up to {last} shows it"
        return f"What was loaded is not what was saved after step {saved}: {first.item} of rank {first.rank}{others}; {then}."
    assert steps.first is not None
    first = steps.first
    return (
        f"The resumed run differs from step {first.step} on, first in {first.item} of rank {first.rank}, though the state was "
        "loaded as it was saved."
    )


def _bounded(comparison: Comparison) -> Comparison:
    left_out = max(0, len(comparison.at_first) - MOST_DIFFERENCES)
    return dataclasses.replace(comparison, at_first=comparison.at_first[:MOST_DIFFERENCES], left_out=left_out)


def curves(arm: str, records: Records) -> tuple[Curve, ...]:
    """Losses and metrics of an arm by step, each from the first rank that has it."""
    points: dict[str, dict[int, float]] = {}
    for record in records.values():
        for event in record.events:
            if event.kind != "step":
                continue
            for name, value in event.values.items():
                if record.groups[name] in _CURVES and (found := number(value)) is not None:
                    points.setdefault(name, {}).setdefault(event.step, float(found))
    return tuple(Curve(arm, name, tuple(sorted(by_step.items()))) for name, by_step in points.items())


def _facts(records: Records) -> dict[str, Any]:
    return records[min(records)].facts if records else {}


def _unobserved(records: Mapping[str, Records]) -> tuple[str, ...]:
    words = (word for arm in records.values() for record in arm.values() for word in record.unobserved)
    return tuple(dict.fromkeys(words))


def _observed(records: Records) -> tuple[tuple[Group, int], ...]:
    if not records:
        return ()
    counts = Counter(records[min(records)].groups.values())
    return tuple((group, counts[group]) for group in GROUPS if counts[group])


def _bytes_per_step(records: Records) -> int:
    sizes = [
        record.stored_bytes / max(1, sum(event.kind == "step" for event in record.events))
        for record in records.values()
    ]
    return round(max(sizes, default=0))
