"""What a verification found, as values: reports are made from these and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ckptguard.core.watching import Group
from ckptguard.resume.records import Kind, Value

Word = Literal["equal", "different", "not deterministic", "failed"]


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One launch.

    Attributes:
        name: ``reference``, ``repeat``, ``save``, ``load``, ``resume``, or, when narrowing, ``reference (modules, step 11)``.
        purpose: What it is for, in words.
        command: The command line.
        environment: Variables added to the user's.
        folder: Streams, log and checkpoints of the arm.
        log: Path of what it printed.
        exit_code: Of the launcher; None if it was stopped by our clock.
        seconds: How long it ran.
        problem: Why it counts as failed, in one sentence; None if it did what was asked.
        last_lines: The end of its log, if it failed.
    """

    name: str
    purpose: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    folder: str
    log: str
    exit_code: int | None
    seconds: float
    problem: str | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Difference:
    """One item that differs in one event of one rank.

    Attributes:
        kind: Event in which the value is compared.
        step: Of that event.
        rank: Global rank.
        item: Its name.
        group: Sort of state.
        one: Value in the arm that is held to be right; None where it has no such item.
        other: Value in the other arm; None where it has no such item.
    """

    kind: Kind
    step: int
    rank: int
    item: str
    group: Group
    one: Value
    other: Value


@dataclass(frozen=True, slots=True)
class Excused:
    """Differences that a rule explains; shown, never hidden, and not part of the verdict.

    Attributes:
        rule: Short name of the rule.
        why: The rule in words, with its reason.
        items: Names concerned.
        ranks: Ranks concerned.
        steps: First and last step at which they differ.
        count: How many values differ.
    """

    rule: str
    why: str
    items: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: tuple[int, int]
    count: int


@dataclass(frozen=True, slots=True)
class KnownFault:
    """A public fault of an installed version whose marks were found.

    Attributes:
        issue: Such as ``NVIDIA/Megatron-LM#6858``.
        title: The fault in one sentence.
        evidence: What was found that has its marks.
        remedy: What to do.
    """

    issue: str
    title: str
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two arms, value by value.

    Attributes:
        one: The arm held to be right.
        other: The arm compared with it.
        question: What its answer decides, in words.
        steps: First and last step compared; equal for a comparison of one state.
        values: How many values were compared.
        ranks: How many ranks.
        first: The first difference: lowest step, then the rank's own order of execution; None if nothing differs.
        at_first: All differences of that event, all ranks, in order of execution within each rank.
        agreeing: Groups that have no difference in that event, with how many values agree.
        cells: ``(rank, step, values that differ, first group that differs)``, only where something does; for the map.
        excused: Differences that a rule explains.
        left_out: How many differences of that event are not in ``at_first``, which reports would be too large with.
    """

    one: str
    other: str
    question: str
    steps: tuple[int, int]
    values: int
    ranks: int
    first: Difference | None
    at_first: tuple[Difference, ...]
    agreeing: tuple[tuple[Group, int], ...]
    cells: tuple[tuple[int, int, int, Group], ...]
    excused: tuple[Excused, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Culprit:
    """What is to blame, as far as it was narrowed.

    Attributes:
        sort: ``state`` (an item that a checkpoint did not carry), ``module`` or ``op``.
        rank: Where.
        step: When.
        name: The item, the module, or the operation in its module.
        why: The evidence in one sentence: inputs agree, outputs differ; or restored alone, the run is equal.
    """

    sort: Literal["state", "module", "op"]
    rank: int
    step: int
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A value of every step of an arm, for charts.

    Attributes:
        arm: Its name.
        name: Such as ``loss lm loss``.
        points: ``(step, value)``.
    """

    arm: str
    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that decides whether a run can be repeated bit for bit.

    Attributes:
        name: Variable or flag.
        found: What it is; None if unset.
        wanted: What it has to be.
        why: The reason.
        severity: ``required`` stops before anything starts, ``advised`` is shown.
        fix: ``variable`` can be set by ``--fix-env``, ``flag`` is the user's to add.
    """

    name: str
    found: str | None
    wanted: str
    why: str
    severity: Literal["required", "advised"]
    fix: Literal["variable", "flag"]


@dataclass(frozen=True, slots=True)
class Verification:
    """The whole answer.

    Attributes:
        word: The verdict.
        sentence: The verdict in one sentence, with the first difference or the failed arm.
        steps: Last step of the reference.
        saved_at: Steps after which the run was saved, the last being the one resumed from.
        facts: Framework, versions, world size and axes, as the ranks told.
        settings: Determinism settings that are not as they should be.
        arms: Every launch, in order.
        comparisons: In order.
        culprits: From the widest to the narrowest.
        chain: The evidence step by step, in words, in the order in which it was gathered.
        known: Known faults whose marks were found.
        curves: Loss and gradient norm of the main arms.
        unobserved: What could not be compared.
        observed: Number of items by group, of rank 0.
        stored_bytes_per_rank_step: Largest mean size of a stream per step.
    """

    word: Word
    sentence: str
    steps: int
    saved_at: tuple[int, ...]
    facts: dict[str, Any]
    settings: tuple[Setting, ...]
    arms: tuple[ArmRun, ...]
    comparisons: tuple[Comparison, ...]
    culprits: tuple[Culprit, ...]
    chain: tuple[str, ...]
    known: tuple[KnownFault, ...]
    curves: tuple[Curve, ...]
    unobserved: tuple[str, ...]
    observed: tuple[tuple[Group, int], ...]
    stored_bytes_per_rank_step: int
