"""Which step all nodes could have, from what each found alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from ckptguard.core.wording import some
from ckptguard.formats import nvrx_local
from ckptguard.view.values import Copy, FoundStep, NodeReport, Step

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One save of a step, put together from all nodes.

    Attributes:
        step: Which.
        small: Copies of the files that every node gets: index, configs and the like; by name.
        data: Copies of the data files, by name, those in CKPT_DIR first.
        common: Data files that every rank reads.
        lacking: Why it cannot be whole, in sentences; empty if it may be.
        notes: What people should know of it.
    """

    step: Step
    small: Mapping[str, tuple[Copy, ...]]
    data: Mapping[str, tuple[Copy, ...]]
    common: tuple[str, ...]
    lacking: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates, best first, and what was left aside.

    Attributes:
        candidates: Those that may be whole and those that cannot, newest first.
        aside: Steps newer than every tracker, in sentences.
    """

    candidates: tuple[Candidate, ...]
    aside: tuple[str, ...]


def choose(reports: Sequence[NodeReport], *, step: str | None, ranks: int | None = None) -> Choice:
    """Orders what was found: newest first; of one number, what may be whole first, then what more nodes have.

    A step newer than every tracker is left aside: its save did not end, or somebody set the tracker back. Local checkpoints
    have no tracker.

    Args:
        reports: Of all nodes.
        step: The only one wanted: a number, or ``release``.
        ranks: Processes of the training run, where they are known: local checkpoints have a file for each.
    """
    found = [one for one in _of_this_run(reports) if step is None or one.step.number == step]
    hosts = {report.node: report.host for report in reports}
    candidates = [_candidate(one, found, hosts, ranks) for one in _saves(found)]
    candidates.sort(key=_rank, reverse=True)
    limit = None if step is not None else _newest_tracker(reports)
    if limit is None:
        return Choice(tuple(candidates), ())
    kept = [c for c in candidates if c.step.kind == "local" or c.step.iteration <= limit]
    aside = [
        f"{c.step.title}: newer than every tracker, the newest of which says {limit}: its save did not end, or the tracker was"
        f" set back; --step {c.step.number} takes it all the same"
        for c in candidates
        if c not in kept
    ]
    return Choice(tuple(kept), tuple(aside))


def tracker_note(reports: Sequence[NodeReport]) -> str | None:
    """That trackers disagree, with what each says; None if they agree."""
    said: dict[str, list[str]] = {}
    for report in reports:
        for where, value in report.trackers.items():
            said.setdefault(value, []).append(f"{where.partition(':')[2]} of node {report.node}")
    if len(said) < 2:
        return None
    return "trackers disagree: " + "; ".join(
        f"{value} says {some(sorted(set(where)), _MOST_NAMED)}" for value, where in sorted(said.items())
    )


def _of_this_run(reports: Sequence[NodeReport]) -> list[FoundStep]:
    """All but global saves that stand in earlier versions of the view only: where they come from is gone, or was cleared away.

    Local checkpoints are saved into the view itself.
    """
    found = [one for report in reports for one in report.found]
    earlier = {report.node: report.earlier for report in reports}
    elsewhere = {one.step for one in found if one.place != earlier[one.node]}
    return [one for one in found if one.place != earlier[one.node] or one.step.kind == "local" or one.step in elsewhere]


def _saves(found: Sequence[FoundStep]) -> list[Step]:
    """Every save of every step; one without a name only where no node can name it."""
    named = {one.step for one in found if one.step.save or one.step.kind == "local"}
    numbers = {(step.kind, step.number) for step in named}
    return [*named, *{one.step for one in found if (one.step.kind, one.step.number) not in numbers}]


def _rank(candidate: Candidate) -> tuple[object, ...]:
    step = candidate.step
    holders = {copy.node for copies in candidate.small.values() for copy in copies}
    return step.iteration, step.kind == "global", not candidate.lacking, len(holders), step.save


def _newest_tracker(reports: Sequence[NodeReport]) -> int | None:
    said = [value for report in reports for value in report.trackers.values()]
    numbers = [int(value) for value in said if value.isdigit()]
    return max(numbers) if numbers else (-1 if "release" in said else None)


def _candidate(step: Step, found: Sequence[FoundStep], hosts: Mapping[int, str], ranks: int | None) -> Candidate:
    same = [one for one in found if (one.step.kind, one.step.number) == (step.kind, step.number)]
    ours = [one for one in same if one.step.save in ("", step.save)]
    others = [one for one in same if one not in ours]
    notes = [f"{_where(one, hosts)}: {text}" for one in ours for text in one.problems]
    notes += [
        f"{_where(one, hosts)}: its .metadata is that of another save (BLAKE3 {one.step.save[:12]}..., not"
        f" {step.save[:12]}...), so no file of this step is taken from there"
        for one in others
        if step.kind == "global"
    ]
    if step.kind == "local":
        return _local(step, ours, tuple(notes), ranks, found)
    naming = [one for one in ours if one.step.save]
    if not naming:
        return Candidate(step, {}, {}, (), (f"no node has its .metadata ({some(notes, _MOST_NAMED)})",), tuple(notes))
    return _global(step, ours, naming, notes)


def _global(step: Step, ours: Sequence[FoundStep], naming: Sequence[FoundStep], notes: list[str]) -> Candidate:
    expected = naming[0].expected  # of one save, so of one .metadata
    there = _by_name(copy for one in ours for copy in one.copies)
    at_home = {(one.node, one.place) for one in naming}
    small, lacking = _small(at_home, {name: copies for name, copies in there.items() if name not in expected})
    data = {}
    for name, least_bytes in expected.items():
        copies = there.get(name, ())
        data[name] = tuple(copy for copy in copies if copy.size_bytes >= least_bytes)
        if not data[name]:
            lacking.append(_no_copy(name, copies, least_bytes))
        notes += [
            f"node {copy.node}: {name}: cut short: {copy.size_bytes} of {least_bytes} bytes, so it is not used"
            for copy in copies
            if copy.size_bytes < least_bytes and (copy.node, copy.place) not in at_home  # else the survey has told
        ]
    return Candidate(step, small, data, naming[0].common, tuple(lacking), tuple(notes))


def _small(
    at_home: Set[tuple[int, int]], there: Mapping[str, tuple[Copy, ...]]
) -> tuple[dict[str, tuple[Copy, ...]], list[str]]:
    """Files that every node gets, as those who have ``.metadata`` of this save have them; another's only if it is the same."""
    small, lacking = {}, []
    for name, copies in there.items():
        ours = [copy for copy in copies if (copy.node, copy.place) in at_home and copy.blake3]
        digests = {copy.blake3 for copy in ours or copies if copy.blake3}
        if len(digests) > 1:
            nodes = some([f"node {copy.node}" for copy in ours or copies], _MOST_NAMED)
            lacking.append(f"{name}: differs between {nodes}, and nothing says which is right")
        elif digests:
            small[name] = tuple(copy for copy in copies if copy.blake3 in digests)
    return small, lacking


def _local(
    step: Step, ours: Sequence[FoundStep], notes: tuple[str, ...], ranks: int | None, found: Sequence[FoundStep]
) -> Candidate:
    """Without an index only the number of ranks says what is missing; else the highest rank of any local step has to."""
    there = _by_name(copy for one in ours for copy in one.copies)
    by_rank = {_rank_of(name): name for name in there}
    seen = [_rank_of(copy.name) for one in found if one.step.kind == "local" for copy in one.copies]
    count = ranks or max(seen, default=-1) + 1
    lacking = []
    if missing := [rank for rank in range(count) if rank not in by_rank]:
        lacking.append(f"no node has the file of rank {some(missing, _MOST_NAMED)} of {count}")
    if beyond := [rank for rank in by_rank if rank >= count]:
        lacking.append(
            f"it has a file of rank {max(beyond)}, but the run has {count} ranks: a local checkpoint fits one layout"
        )
    if ranks is None and notes:
        lacking.append(f"how many ranks it is of is not known (--ranks-per-node says it), and {notes[0]}")
    if not by_rank:
        lacking.append(f"no file of it can be used ({some(notes, _MOST_NAMED)})")
    data = {}
    for name, copies in there.items():
        data[name] = tuple(copy for copy in copies if copy.size_bytes)
        if not data[name]:
            lacking.append(_no_copy(name, copies, 1))
    return Candidate(step, {}, data, (), tuple(lacking), notes)


def _rank_of(name: str) -> int:
    parsed = nvrx_local.parse(name.rpartition("/")[2])
    assert parsed is not None, name  # the survey takes no others
    return parsed.rank


def _by_name(copies: Iterable[Copy]) -> dict[str, tuple[Copy, ...]]:
    out: dict[str, list[Copy]] = {}
    for copy in copies:
        out.setdefault(copy.name, []).append(copy)
    return {name: tuple(sorted(group, key=lambda c: (c.place, c.node))) for name, group in sorted(out.items())}


def _no_copy(name: str, copies: Sequence[Copy], least_bytes: int) -> str:
    if not copies:
        return f"{name}: no node has it, and no source"
    shown = some([f"{copy.size_bytes} on node {copy.node}" for copy in copies], _MOST_NAMED)
    return f"{name}: cut short everywhere: {shown} of {least_bytes} bytes"


def _where(one: FoundStep, hosts: Mapping[int, str]) -> str:
    source = f", source {one.place}" if one.place else ""
    return f"node {one.node} ({hosts[one.node]}{source})"
