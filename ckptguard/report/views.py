"""What nodes have of a checkpoint, what they agreed on and how files came: as lines, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptguard.core.wording import some
from ckptguard.report import units
from ckptguard.report.lines import facts, title
from ckptguard.report.words import numbers

if TYPE_CHECKING:
    from ckptguard.view.choosing import Candidate
    from ckptguard.view.nodes import Nodes
    from ckptguard.view.preparing import Result
    from ckptguard.view.pruning import View
    from ckptguard.view.values import Agreement, Delivered, Delivery, NodeReport, Step

_MOST_NODES = 32
_MOST_NAMES = 3
_ORDER = ("linked", "cloned", "copied", "downloaded", "fetched", "kept")


def nodes_line(nodes: Nodes) -> str:
    """Which node this is, and what it can be reached at."""
    if nodes.count == 1:
        return f"node 0 ({nodes.host}), the only one"
    return f"node {nodes.number} of {nodes.count} ({nodes.host}, {nodes.address})"


def prepared_lines(result: Result, nodes: Nodes) -> Iterator[str]:
    """What ``prepare`` came to; more on node 0, which knows of all."""
    agreement = result.agreement
    assert agreement is not None
    if nodes.number:
        came = f"; {_ways(result.delivered)}" if result.view is not None else ""
        yield f"node {nodes.number} ({nodes.host}): {_verdict(result, agreement)}{came}"
        return
    yield title(_verdict(result, agreement))
    yield from facts([("reads", agreement.how), ("agreement", f"{agreement.id}, {agreement.made}")])
    yield from survey_lines(result.reports, result.candidates, agreement.step)
    yield from notes_lines(result.notes)
    if result.view is None:
        yield from _planned_lines(result.planned, result.reports)
    else:
        yield from _delivered_lines(agreement)


def _verdict(result: Result, agreement: Agreement) -> str:
    if result.view is None:
        return f"{agreement.step.title} would be taken"
    return f"{result.view} holds {agreement.step.title}"


def status_lines(result: Result, nodes: Nodes, views: Sequence[View]) -> Iterator[str]:
    """What ``status`` found."""
    if nodes.number:
        yield f"node {nodes.number} ({nodes.host}): told node 0 what is here"
    else:
        yield from survey_lines(result.reports, result.candidates, None)
        yield from notes_lines(result.notes)
        best = best_of(result.candidates)
        if best is not None:
            yield f"{click.style('can be whole', fg='green', bold=True)}: {best.title} is the newest, if its files are sound"
        else:
            yield f"{click.style('NOTHING WHOLE', fg='red', bold=True)}: no step can be made whole on every node"
    for view in views:
        yield view_line(view)


def best_of(candidates: Iterable[Candidate]) -> Step | None:
    """The step that would be tried first."""
    return next((candidate.step for candidate in candidates if not candidate.lacking), None)


def notes_lines(notes: Iterable[str]) -> Iterator[str]:
    """What people should know, one line each."""
    for note in notes:
        yield f"  {click.style('note', fg='yellow')} {note}"


# ---- what each node has ----


def survey_lines(reports: Sequence[NodeReport], candidates: Sequence[Candidate], chosen: Step | None) -> Iterator[str]:
    """Every step, and what each node has of it; nodes that have the same stand in one line."""
    for report in reports:
        for note in report.notes:
            yield f"  {click.style('note', fg='yellow')} node {report.node} ({report.host}): {note}"
    for candidate in candidates:
        yield f"  {click.style(candidate.step.title, bold=True)}{_state(candidate, chosen)}"
        told: dict[str, list[NodeReport]] = {}
        for report in reports:
            told.setdefault(_has(report, candidate), []).append(report)
        width = max(len(_who(group)) for group in told.values())
        for text, group in told.items():
            yield f"    {_who(group):<{width}}  {text}"
        for text in candidate.notes[:_MOST_NODES]:
            yield f"    {click.style('problem', fg='red')} {text}"


def _state(candidate: Candidate, chosen: Step | None) -> str:
    if candidate.step == chosen:
        return click.style("  chosen", fg="green")
    if candidate.lacking:
        more = f" (and {len(candidate.lacking) - 1} more)" if len(candidate.lacking) > 1 else ""
        return f"  {click.style('cannot be whole', fg='red')}: {candidate.lacking[0]}{more}"
    return ""


def _who(group: Sequence[NodeReport]) -> str:
    if len(group) == 1:
        return f"node {group[0].node} ({group[0].host})"
    return f"nodes {numbers(report.node for report in group)}"


def _has(report: NodeReport, candidate: Candidate) -> str:
    """``all 12 files, 3.0 GiB``, or what is missing; the first place is the node's own."""
    sizes, missing = _own(report, candidate), _missing(report, candidate)
    if not sizes:
        return "nothing"
    size = units.size(sum(sizes.values()))
    if not missing:
        return f"all {len(sizes)} files, {size}"
    return f"{len(sizes)} of {len(sizes) + len(missing)} files, {size}; lacks {some(missing, _MOST_NAMES)}"


def _own(report: NodeReport, candidate: Candidate) -> dict[str, int]:
    """Sizes of the files in the node's first place, in bytes."""
    copies = [copy for group in (*candidate.small.values(), *candidate.data.values()) for copy in group]
    return {copy.name: copy.size_bytes for copy in copies if copy.node == report.node and copy.place == 0}


def _missing(report: NodeReport, candidate: Candidate) -> list[str]:
    return sorted({*candidate.small, *candidate.data}.difference(_own(report, candidate)))


# ---- how files came ----


def _ways(delivered: Iterable[Delivered]) -> str:
    """``9 files: 5 linked, 4 fetched (1.2 GiB)``."""
    came = [one for one in delivered if not one.problem]
    moved_bytes = sum(one.moved_bytes for one in came)
    return f"{len(came)} files: {_counts(one.how for one in came)}" + (
        f" ({units.size(moved_bytes)} moved)" if came else ""
    )


def _counts(ways: Iterable[str]) -> str:
    found = list(ways)
    counts = {way: found.count(way) for way in _ORDER}
    return ", ".join(f"{count} {way}" for way, count in counts.items() if count) or "none"


def _delivered_lines(agreement: Agreement) -> Iterator[str]:
    for node, names in sorted(agreement.origins.items())[:_MOST_NODES]:
        size = units.size(sum(agreement.files[name].size_bytes for name in names if name in agreement.files))
        ways = _counts(text.partition(" ")[0] for text in names.values())
        yield f"  node {node} ({agreement.hosts[node]})  {len(names)} files, {size}: {ways}"
    if len(agreement.origins) > _MOST_NODES:
        yield f"  and {len(agreement.origins) - _MOST_NODES} more nodes; --json lists all"


def _planned_lines(planned: Sequence[Delivery], reports: Sequence[NodeReport]) -> Iterator[str]:
    for report in reports[:_MOST_NODES]:
        own = [one for one in planned if one.node == report.node]
        moved = [one for one in own if one.via is not None or one.copy.place != 0]
        size = units.size(sum(one.digest.size_bytes for one in moved))
        yield f"  node {report.node} ({report.host})  {len(own)} data files, {len(moved)} of them from elsewhere ({size})"


# ---- views ----


def view_line(view: View) -> str:
    """One version of a view."""
    what = view.step.title if view.step is not None else "unfinished"
    state = "current" if view.current else "confirmed" if view.confirmed else "not confirmed"
    size = f"{units.size(view.size_bytes)}, {units.size(view.own_bytes)} of it nowhere else"
    problem = f"; {view.problem}" if view.problem else ""
    return f"  {view.path}  {what}, {state}, {size}{problem}"


def pruned_lines(removed: Sequence[View], *, dry_run: bool) -> Iterator[str]:
    """What ``prune`` removed, or would."""
    for view in removed:
        yield view_line(view)
    word = "would be removed" if dry_run else "removed"
    freed = units.size(sum(view.own_bytes for view in removed))
    yield f"{len(removed)} {word}, {freed} given back" if removed else f"nothing {word}"


# ---- JSON ----


def result_dict(result: Result, nodes: Nodes) -> dict[str, Any]:
    """All of it, ready for JSON; digests of blocks are left to the record in the view."""
    from ckptguard.view.messages import to_plain

    agreement = result.agreement
    return {
        "node": nodes.number,
        "nodes": nodes.count,
        "host": nodes.host,
        "address": nodes.address,
        "view": None if result.view is None else str(result.view),
        "agreement": None if agreement is None else _agreement_dict(agreement),
        "delivered": [to_plain(one) for one in result.delivered],
        "notes": [*nodes.notes, *result.notes],
        "reports": [_report_dict(report) for report in result.reports],
        "candidates": [_candidate_dict(candidate, result.reports) for candidate in result.candidates],
        "needs": None if result.needs is None else to_plain(result.needs),
        "planned": [to_plain(one) for one in result.planned],
    }


def _agreement_dict(agreement: Agreement) -> dict[str, Any]:
    from ckptguard.view.messages import to_plain

    plain: dict[str, Any] = to_plain(agreement)
    for digest in plain["files"].values():
        del digest["blocks"], digest["block_bytes"]
    return plain


def _report_dict(report: NodeReport) -> dict[str, Any]:
    """What a node found, files counted and not listed."""
    from ckptguard.view.messages import to_plain

    found = [
        {
            "step": to_plain(one.step),
            "place": report.places[one.place],
            "files": len(one.copies),
            "bytes": sum(copy.size_bytes for copy in one.copies),
            "problems": list(one.problems),
        }
        for one in report.found
    ]
    return {
        "node": report.node,
        "host": report.host,
        "places": list(report.places),
        "trackers": dict(report.trackers),
        "found": found,
        "notes": list(report.notes),
        "free_bytes": report.free_bytes,
        "sees": list(report.sees),
    }


def _candidate_dict(candidate: Candidate, reports: Sequence[NodeReport]) -> dict[str, Any]:
    from ckptguard.view.messages import to_plain

    return {
        "step": to_plain(candidate.step),
        "whole": not candidate.lacking,
        "lacking": list(candidate.lacking),
        "notes": list(candidate.notes),
        "files": len(candidate.small) + len(candidate.data),
        "missing": {report.node: _missing(report, candidate) for report in reports},
    }


def view_dict(view: View) -> dict[str, Any]:
    """A version, ready for JSON."""
    from ckptguard.view.messages import to_plain

    step: Mapping[str, Any] | None = None if view.step is None else to_plain(view.step)
    return {
        "path": str(view.path), "current": view.current, "confirmed": view.confirmed, "step": step, "made": view.made,
        "size_bytes": view.size_bytes, "own_bytes": view.own_bytes, "problem": view.problem,
    }  # fmt: skip
