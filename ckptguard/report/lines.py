"""Results as styled lines; ``click.echo`` drops the styles where nobody sees them. No rich: it takes its time to import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.report import units

if TYPE_CHECKING:
    from ckptguard.core.problems import Problem
    from ckptguard.engine.verify import Report

_MAX_PROBLEMS = 50


def title(text: str) -> str:
    """A heading."""
    return click.style(text, bold=True)


def facts(pairs: Sequence[tuple[str, str | None]]) -> Iterator[str]:
    """One line a fact; those without a value are left out."""
    for name, value in pairs:
        if value:
            yield f"  {click.style(f'{name:<11}', bold=True)} {value}"


def of_report(report: Report) -> Iterator[str]:
    """``verify``."""
    damage = [p for p in report.problems if p.is_damage]
    sealed = f"seal {report.seal}" if report.seal else "not sealed"
    yield title(report.location)
    yield from facts([("format", f"{report.format or 'unreadable'}, {report.files} files, {sealed}")])
    for text in report.proved:
        yield f"  {click.style('checked', fg='green')}     {text}"
    yield from of_problems([p for p in report.problems if not p.is_damage])
    yield from of_problems(damage)
    if damage:
        files, tensors = {p.file for p in damage if p.file}, {p.tensor for p in damage if p.tensor}
        counts = f"{len(damage)} problems in {len(files)} files, {len(tensors)} tensors or objects"
        yield f"{click.style('DAMAGED', fg='red', bold=True)}: {counts}"
    else:
        compared = f"{units.size(report.bytes_checked)} compared" if report.bytes_checked else "no bytes were compared"
        yield f"{click.style('whole', fg='green', bold=True)}: no damage found ({compared})"


def of_problems(problems: Sequence[Problem]) -> Iterator[str]:
    """One line a problem, with the rank that wrote the file where its name says it."""
    for problem in problems[:_MAX_PROBLEMS]:
        kind = click.style(problem.kind, fg="red" if problem.is_damage else "yellow")
        yield f"  {kind} {problem.message}" + (f" (rank {problem.rank})" if problem.rank else "")
    if len(problems) > _MAX_PROBLEMS:
        yield f"  and {len(problems) - _MAX_PROBLEMS} more; --json lists all"


def of_error(error: CkptguardError) -> Iterator[str]:
    """An error: what, all problems, the next step."""
    first, *rest = str(error).splitlines()
    yield f"{click.style('error:', fg='red', bold=True)} {first}"
    if isinstance(error, DamagedError) and len(error.problems) > 1:
        yield from of_problems(error.problems)
    yield from rest


def error_dict(error: CkptguardError) -> dict[str, Any]:
    """An error for --json."""
    problems = error.problems if isinstance(error, DamagedError) else ()
    return {
        "error": {
            "class": type(error).__name__,
            "exit_code": int(error.exit_code),
            "message": str(error),
            "next_step": error.next_step,
            "problems": [p.as_dict() for p in problems],
        }
    }
