"""How node 0 leads all nodes to one view: from answers to orders, step by step. Pure: no file is opened here, no clock read.

::

    work = direct(wanted)
    order = next(work)
    while True:
        order = work.send(answers of all nodes to the order)     # ends with StopIteration, whose value is the Outcome

The newest step is tried first. A copy that is found damaged is dropped, and another one is looked for; where none is left the
step is given up, and the one before it is tried.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckptguard.core.errors import CkptguardError, DamagedError, EnvironmentFailedError, NotFoundError
from ckptguard.view.choosing import Candidate, choose, tracker_note
from ckptguard.view.collecting import Collecting, UnableError
from ckptguard.view.orders import Answer, Order, Refusal
from ckptguard.view.values import Agreement, Delivered, Delivery, Needs, NodeReport

Work = Generator[Order, tuple[Answer, ...], "Outcome"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a run of all nodes is to reach.

    Attributes:
        id: Random, hexadecimal: of this run, and of the agreement it comes to.
        made: When, ISO 8601 in UTC.
        step: The only step wanted; None for the newest.
        ranks: Processes of the training run, if known.
        dry_run: Stop before data files are checked and moved.
        survey_only: Stop after the survey.
    """

    id: str
    made: str
    step: str | None = None
    ranks: int | None = None
    dry_run: bool = False
    survey_only: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of all nodes came to.

    Attributes:
        reports: What each node found.
        candidates: The steps, newest first.
        agreement: What was published, or in a dry run would be; None without.
        refusal: Why there is none.
        needs: Which files each node reads.
        planned: In a dry run, what would be moved; digests are not known yet.
        delivered: Per node, how its files came.
        notes: What people should know: steps passed over, copies found bad, trackers that disagree.
    """

    reports: tuple[NodeReport, ...]
    candidates: tuple[Candidate, ...] = ()
    agreement: Agreement | None = None
    refusal: Refusal | None = None
    needs: Needs | None = None
    planned: tuple[Delivery, ...] = ()
    delivered: Mapping[int, tuple[Delivered, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def direct(wanted: Wanted) -> Work:
    """The orders of a run; ends with its outcome."""
    reports = _reports((yield Order("survey")))
    choice = choose(reports, step=wanted.step, ranks=wanted.ranks)
    passed_over = list(choice.aside)
    notes = [note for note in (tracker_note(reports),) if note]
    if wanted.survey_only:
        yield Order("end", notes=(*notes, *passed_over))
        return Outcome(reports, choice.candidates, notes=(*notes, *passed_over))
    for candidate in choice.candidates:
        notes += [note for note in candidate.notes if note not in notes]
        if candidate.lacking:
            passed_over.append(f"{candidate.step.title}: {'; '.join(candidate.lacking[:4])}")
            continue
        attempt = _Attempt(wanted, candidate, reports, tuple(passed_over))
        try:
            outcome = yield from attempt.work()
        except UnableError as error:
            notes += attempt.collecting.told
            if error.refusal is not None:
                return (yield from _refuse(error.refusal, reports, choice.candidates, (*notes, *passed_over)))
            passed_over.append(f"{candidate.step.title}: {error}")
            continue
        said = (*notes, *attempt.collecting.told, *passed_over)
        yield Order("end", agreement=outcome.agreement, notes=said)
        return Outcome(
            reports, choice.candidates, outcome.agreement, None, outcome.needs, outcome.planned, outcome.delivered, said
        )
    refusal = _none_left(wanted, reports, passed_over)
    return (yield from _refuse(refusal, reports, choice.candidates, tuple(notes)))


def _refuse(
    refusal: Refusal, reports: tuple[NodeReport, ...], candidates: tuple[Candidate, ...], notes: tuple[str, ...]
) -> Work:
    yield Order("end", refusal=refusal, notes=notes)
    return Outcome(reports, candidates, refusal=refusal, notes=notes)


def _none_left(wanted: Wanted, reports: Sequence[NodeReport], passed_over: Sequence[str]) -> Refusal:
    if passed_over:
        what = (
            "no step can be made whole on every node"
            if wanted.step is None
            else f"step {wanted.step} cannot be made whole"
        )
        step = "Bring back a node or a disk that has the missing files, or name another place with --source."
        return Refusal("damaged", "\n  ".join([f"{what}:", *passed_over]), step)
    looked = "; ".join(f"node {r.node} ({r.host}): {', '.join(r.places)}" for r in reports)
    what = "no checkpoint" if wanted.step is None else f"no checkpoint of step {wanted.step}"
    message, step = f"{what} on any node. Looked at {looked}", "Give the directory that training saves to."
    trackers = sorted({said for report in reports for said in report.trackers.values()})
    if trackers or wanted.step is not None:
        told = f", though trackers say {', '.join(trackers)}" if trackers else ""
        return Refusal("damaged", message + told, step)
    return Refusal("absent", message, f"{step} For the first start of a run there is --allow-none.")


def _reports(answers: Iterable[Answer]) -> tuple[NodeReport, ...]:
    return tuple(answer.report for answer in answers if answer.report is not None)


class _Attempt:
    """Makes one step whole on every node."""

    def __init__(
        self, wanted: Wanted, candidate: Candidate, reports: tuple[NodeReport, ...], passed_over: tuple[str, ...]
    ) -> None:
        self.wanted, self.candidate, self.reports, self.passed_over = wanted, candidate, reports, passed_over
        self.leader = {report.node: min((*report.sees, report.node)) for report in reports}
        self.collecting = Collecting(candidate, reports)

    def work(self) -> Work:
        """The orders; ends with the outcome.

        Raises:
            UnableError: The step cannot be made whole.
        """
        candidate, everywhere = self.candidate, tuple(sorted(set(self.leader.values())))
        yield from self.collecting.bring(dict.fromkeys(candidate.small, everywhere))
        yield from self.collecting.bring(dict.fromkeys(candidate.common, everywhere))
        names = tuple(sorted(candidate.data))
        answers = yield Order("needs", candidate.step, names=names)
        needs = next(answer.needs for answer in answers if answer.needs is not None)
        nodes = self._by_leader(needs)
        if self.wanted.dry_run:
            planned = self.collecting.planned(nodes)
            return Outcome(self.reports, agreement=self._agreement(needs), needs=needs, planned=planned)
        yield from self.collecting.bring(nodes)
        collected = self.collecting.result()
        agreement = self._agreement(needs)
        yield Order("publish", candidate.step, agreement=agreement)
        yield Order("confirm", candidate.step, agreement=agreement)
        delivered = {node: tuple(one.values()) for node, one in collected.items()}
        return Outcome(self.reports, agreement=agreement, needs=needs, delivered=delivered)

    def _by_leader(self, needs: Needs) -> dict[str, tuple[int, ...]]:
        """Per data file, the nodes that get it: of nodes that share the view's directory, one for all."""
        out: dict[str, set[int]] = {}
        for node, names in needs.names.items():
            for name in names:
                out.setdefault(name, set()).add(self.leader[node])
        return {name: tuple(sorted(nodes)) for name, nodes in sorted(out.items())}

    def _agreement(self, needs: Needs) -> Agreement:
        return Agreement(
            self.wanted.id,
            self.candidate.step,
            len(self.reports),
            tuple(report.host for report in self.reports),
            self.wanted.made,
            needs.how,
            self.passed_over,
            self.collecting.digests(),
            self.collecting.origins(),
            self.reports[0].places[: self.reports[0].earlier],
        )


_ERRORS: Mapping[str, type[CkptguardError]] = {
    "absent": NotFoundError,
    "damaged": DamagedError,
    "environment": EnvironmentFailedError,
}


def error_of(refusal: Refusal) -> CkptguardError:
    """The error that every node raises for a refusal."""
    return _ERRORS[refusal.blame](refusal.message, next_step=refusal.next_step)
