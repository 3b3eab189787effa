"""What ``verify-resume`` found: as one screen of lines and as plain values for JSON; ``resume_page`` makes a page of it."""

from __future__ import annotations

import dataclasses
import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import click

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.report import units
from ckptguard.report.words import (
    answer,
    counts,
    decisive,
    differing,
    ending,
    moment,
    numbers,
    printable,
    ranks_text,
    steps_text,
    value_text,
)
from ckptguard.resume.results import Comparison, Difference, Verification, Word

FORMAT = "ckptguard-verify-resume/1"  # of report.json; another number where a key goes away or means something else
COLOURS: dict[Word, str] = {"equal": "green", "different": "red", "not deterministic": "yellow", "failed": "red"}
_MAX_ARMS, _MAX_COMPARISONS, _MAX_CULPRITS, _MAX_KNOWN, _MAX_LOG, _MAX_OTHERS = 8, 6, 2, 2, 6, 3
_INDENT = 14


# The screen


def screen(verification: Verification, folder: PurePath | None = None, width: int | None = None) -> Iterator[str]:
    """The verdict in one screen.

    Args:
        verification: What was found.
        folder: Where report.html and report.json are; None if nowhere.
        width: Columns; by default those of the terminal, 100 at most.
    """
    columns = width or min(shutil.get_terminal_size((100, 24)).columns, 100)
    for name, colour, texts in _sections(verification, folder):
        if name == "":
            yield from _verdict(verification, columns)
            continue
        label = click.style(f"{name:<11}", fg=colour, bold=True)
        for text in texts:
            wrapped = textwrap.wrap(
                printable(text), max(columns - _INDENT, 20), break_on_hyphens=False,
                subsequent_indent="" if text[:1] != " " else "  ", drop_whitespace=True,
            )  # fmt: skip
            for line in wrapped:
                yield f"  {label} {line}".rstrip()
                label = " " * 11


def _verdict(verification: Verification, columns: int) -> Iterator[str]:
    word = verification.word if verification.word == "equal" else verification.word.upper()
    first, *rest = textwrap.wrap(f"{word}: {printable(verification.sentence)}", columns, break_on_hyphens=False)
    yield click.style(word, fg=COLOURS[verification.word], bold=True) + first.removeprefix(word)
    yield from rest
    yield ""


def _sections(found: Verification, folder: PurePath | None) -> Iterator[tuple[str, str | None, Sequence[str]]]:
    """Label, colour, and lines that may yet be wrapped."""
    yield "", None, ()
    yield "run", None, [_run(found)]
    for arm in found.arms:
        if arm.problem:
            yield "failed", "red", [f"{arm.name}: {arm.problem}", *arm.last_lines[-_MAX_LOG:], f"log: {arm.log}"]
    comparison = decisive(found)
    if comparison is not None and comparison.first is not None:
        yield from _first(comparison, comparison.first)
    yield (
        "culprit",
        "red",
        [
            text
            for culprit in found.culprits[-_MAX_CULPRITS:]
            for text in (f"{culprit.sort}: {culprit.name} (rank {culprit.rank}, step {culprit.step})", culprit.why)
        ],
    )
    for known in found.known[:_MAX_KNOWN]:
        yield (
            "known",
            "yellow",
            [f"{known.issue}: {known.title}", f"found: {known.evidence}", f"remedy: {known.remedy}"],
        )
    yield "settings", "yellow", _settings(found)
    yield "arms", None, _capped(_aligned([(a.name, f"{a.seconds:6.1f} s", ending(a)) for a in found.arms]), _MAX_ARMS)
    yield "compared", None, _capped(_comparisons(found.comparisons), _MAX_COMPARISONS)
    yield "items", None, [f"{counts(found.observed)} on rank 0"] if found.observed else []
    excused = {e.rule: e for c in found.comparisons for e in c.excused}
    for rule in excused.values():
        total = sum(e.count for c in found.comparisons for e in c.excused if e.rule == rule.rule)
        yield "excused", None, [f"{rule.rule}, {total:,} values of {', '.join(rule.items[:_MAX_OTHERS])}: {rule.why}"]
    yield "unobserved", None, _capped(list(found.unobserved), _MAX_OTHERS)
    if folder is not None:
        yield "report", None, [str(folder / name) for name in ("report.html", "report.json")]


def _run(found: Verification) -> str:
    saved = f"saved after {numbers(found.saved_at)}" if found.saved_at else "not saved"
    ranks = max((c.ranks for c in found.comparisons), default=0)
    said = [f"{found.steps} steps, {saved}", f"{ranks} rank{'s' * (ranks != 1)}" if ranks else ""]
    if found.stored_bytes_per_rank_step:
        said.append(f"{units.size(found.stored_bytes_per_rank_step)} recorded a rank and step")
    return ", ".join(filter(None, [str(found.facts.get("framework", "")), *said]))


def _first(comparison: Comparison, first: Difference) -> Iterator[tuple[str, str | None, Sequence[str]]]:
    values = _aligned([(comparison.one, value_text(first.one)), (comparison.other, value_text(first.other))])
    yield "first", "red", [f"{moment(first)}: {first.item}", *values]
    ranks = {d.rank for d in comparison.at_first}
    where = f"({ranks_text(ranks)} of {comparison.ranks}, in this event)"
    yield "differ", None, [f"{counts(differing(comparison))} {where}"]
    yield "agree", None, [counts(comparison.agreeing)] if comparison.agreeing else []


def _settings(found: Verification) -> list[str]:
    said = [
        f"{s.name} is {'not set' if s.found is None else s.found}, {s.severity}: {s.wanted}" for s in found.settings
    ]
    return _capped(said, _MAX_OTHERS)


def _comparisons(comparisons: Sequence[Comparison]) -> list[str]:
    return _aligned(
        [(f"{c.one} with {c.other}", steps_text(c.steps), f"{c.values:,} values", answer(c)) for c in comparisons]
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _capped(texts: list[str], most: int) -> list[str]:
    return texts if len(texts) <= most else [*texts[: most - 1], f"and {len(texts) - most + 1} more in the report"]


# JSON


def to_json(verification: Verification) -> dict[str, Any]:
    """The whole answer for ``--json`` and report.json.

    Keys are ``format``, which is ``ckptguard-verify-resume/1``, and the fields of ``Verification`` (resume/results.py), whose
    docstrings say what they hold: ``word``, ``sentence``, ``steps``, ``saved_at``, ``facts``, ``settings``, ``arms``,
    ``comparisons``, ``culprits``, ``chain``, ``known``, ``curves``, ``unobserved``, ``observed``,
    ``stored_bytes_per_rank_step``. Within them every field of every value has the field's name; tuples are lists. JSON has no
    number that is not finite: such ones are the strings ``NaN``, ``Infinity`` and ``-Infinity``.
    """
    return {"format": FORMAT, **_plain(verification)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(value: Any, where: str = "report.json") -> Verification:
    """What ``to_json`` was given.

    Args:
        value: What it returned, also after JSON.
        where: Its place, for messages.

    Raises:
        DamagedError: It is something else.
        UnsupportedError: It has the format of another release.
    """
    if not isinstance(value, dict) or "format" not in value:
        raise DamagedError(f"{where}: not a report of verify-resume (no key 'format')")
    if value["format"] != FORMAT:
        raise UnsupportedError(
            f"{where}: report of format {value['format']!r}, this ckptguard reads {FORMAT!r}",
            next_step="Read it with the release that wrote it.",
        )
    try:
        return _built(Verification, value)  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{where}: not a report of verify-resume ({type(error).__name__}: {error})") from error


def _built(kind: Any, value: Any) -> Any:
    """A value of that type from its plain form."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**{name: _built(of, value[name]) for name, of in _fields(kind)})
    if get_origin(kind) is UnionType:
        return None if value is None else _built(next(of for of in get_args(kind) if of is not NoneType), value)
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[-1] is Ellipsis:
            return tuple(_built(parts[0], item) for item in value)
        return tuple(_built(part, item) for part, item in zip(parts, value, strict=True))
    return float(value) if kind is float else value


@cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(get_type_hints(kind).items())
