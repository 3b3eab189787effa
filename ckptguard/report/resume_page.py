"""report.html of ``verify-resume``: one file that asks the network for nothing and is whole without scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ckptguard import __version__
from ckptguard.report import units
from ckptguard.report.curves import curve_figures
from ckptguard.report.markup import Content, Markup, element, joined
from ckptguard.report.rank_map import map_figure
from ckptguard.report.resume_style import SCRIPT, STYLE
from ckptguard.report.words import (
    answer,
    decisive,
    differing,
    ending,
    moment,
    numbers,
    ranks_text,
    steps_text,
    value_text,
)
from ckptguard.resume.results import ArmRun, Comparison, Difference, Verification, Word

_TONES: Mapping[Word, tuple[str, str]] = {
    "equal": ("good", "✓ Equal"),
    "different": ("bad", "✗ Different"),
    "not deterministic": ("warn", "≠ Not deterministic"),
    "failed": ("bad", "! Failed"),
}
_MAX_ITEMS, _MAX_NAMES, _MAX_VALUE, _MAX_FACT, _MAX_CELLS = 2000, 60, 96, 20_000, 4000

type Section = tuple[str, str, Content]  # id, heading, content


def page(verification: Verification) -> str:
    """The whole page.

    Nothing in it comes from elsewhere, and its own policy allows neither requests nor any script or style but the two that
    ckptguard wrote. Below 2 MB for any number of ranks and steps: both are merged into bands, and tables are cut with the
    number left out said.
    """
    tone, word = _TONES[verification.word]
    sections = [s for s in _sections(verification) if s[2]]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", f"verify-resume: {verification.word}"),
        element("style", Markup(STYLE)),
    )
    body = element(
        "body",
        element("header", _banner(verification, tone, word), _strip(verification), _contents(sections)),
        element("main", [element("section", element("h2", title), content, id=key) for key, title, content in sections]),
        element("footer", f"ckptguard {__version__}, verify-resume. Everything shown, and what is left out here: report.json."),
        element("script", Markup(SCRIPT)),
    )  # fmt: skip
    return "<!doctype html>\n" + element("html", head, "\n", body, lang="en") + "\n"


def _policy() -> str:
    script, style = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (SCRIPT, STYLE))
    return f"default-src 'none'; img-src data:; script-src 'sha256-{script}'; style-src 'sha256-{style}'"


def _banner(verification: Verification, tone: str, word: str) -> Markup:
    return element(
        "div",
        element("p", "ckptguard verify-resume", class_="kicker"),
        element("h1", word),
        element("p", verification.sentence, class_="sentence"),
        class_=f"verdict {tone}",
    )


def _strip(verification: Verification) -> Markup:
    compared = sum(c.values for c in verification.comparisons)
    recorded = units.size(verification.stored_bytes_per_rank_step)
    pairs = [
        ("steps", verification.steps),
        ("saved after", f"step {numbers(verification.saved_at)}" if verification.saved_at else "never"),
        ("ranks", max((c.ranks for c in verification.comparisons), default=0)),
        ("values compared", f"{compared:,}"),
        ("recorded a rank and step", recorded if verification.stored_bytes_per_rank_step else None),
        ("framework", verification.facts.get("framework")),
    ]
    return element(
        "dl",
        [element("div", element("dt", name), element("dd", str(value))) for name, value in pairs if value],
        class_="numbers-strip",
    )


def _contents(sections: Sequence[Section]) -> Markup:
    links = [element("li", element("a", title, href=f"#{key}")) for key, title, _ in sections]
    return element("nav", element("ul", links), aria_label="On this page")


def _sections(found: Verification) -> Iterator[Section]:
    comparison = decisive(found)
    yield "failed", "What failed", [_failure(arm) for arm in found.arms if arm.problem]
    if comparison is not None and comparison.first is not None:
        yield "first", "First difference", _first(comparison, comparison.first)
    yield "culprits", "To blame", element("ul", _culprits(found), class_="cards") if found.culprits else None
    yield "known", "Known faults", element("ul", _known(found), class_="cards") if found.known else None
    yield (
        "chain",
        "Evidence",
        element("ol", [element("li", t) for t in found.chain], class_="chain") if found.chain else None,
    )
    yield "curves", "Curves", list(curve_figures(found.curves, found.saved_at))
    differ = [c for c in found.comparisons if c.cells]
    budget = _MAX_CELLS // max(1, sum(c.steps[0] < c.steps[1] for c in differ))
    maps = [map_figure(c, found.saved_at, budget) for c in differ]
    yield "map", "Ranks by step", maps
    if comparison is not None:
        yield "items", "Items", _items(comparison)
    yield "compared", "Comparisons", _comparisons(found) if found.comparisons else None
    yield "excused", "Excused", _excused(found)
    yield "unobserved", "Not observed", _listed(found.unobserved)
    yield "arms", "Arms", element("ul", [_arm(arm) for arm in found.arms], class_="arms") if found.arms else None
    yield "settings", "Settings", _settings(found)
    yield "facts", "Run", _facts(found)


# What was found


def _failure(arm: ArmRun) -> Markup:
    return element(
        "div",
        element("h3", arm.name),
        element("p", arm.problem),
        element("p", "Log: ", element("code", arm.log), class_="note"),
        element("pre", _lines(arm.last_lines), tabindex=0, aria_label="end of its log") if arm.last_lines else None,
        class_="card",
    )


def _lines(lines: Sequence[str]) -> Markup:
    return Markup("\n".join(joined(line) for line in lines))


def _first(comparison: Comparison, first: Difference) -> Markup:
    ranks = {d.rank for d in comparison.at_first}
    where = f"on {ranks_text(ranks)} of {comparison.ranks}"
    pairs: list[tuple[str, Content]] = [
        ("where", moment(first)),
        ("item", [element("code", first.item), f" ({first.group})"]),
        (comparison.one, element("code", value_text(first.one, _MAX_VALUE))),
        (comparison.other, element("code", value_text(first.other, _MAX_VALUE))),
        ("differ", [_tags(differing(comparison)), element("p", where, class_="note")]),
        ("still agree", _tags(comparison.agreeing) if comparison.agreeing else "nothing that was compared"),
    ]  # fmt: skip
    return element("dl", [(element("dt", name), element("dd", value)) for name, value in pairs], class_="pairs")


def _tags(pairs: Sequence[tuple[str, int]]) -> Markup:
    return element("ul", [element("li", name, " ", element("b", f"{count:,}")) for name, count in pairs], class_="tags")


def _culprits(found: Verification) -> Iterator[Markup]:
    for culprit in found.culprits:
        yield element(
            "li",
            element("h3", element("span", culprit.sort, class_="badge bad"), element("code", culprit.name)),
            element("p", culprit.why),
            element("p", f"rank {culprit.rank}, step {culprit.step}", class_="note"),
            class_="card",
        )


def _known(found: Verification) -> Iterator[Markup]:
    for known in found.known:
        pairs = [("found", known.evidence), ("remedy", known.remedy)]
        yield element(
            "li",
            element("h3", element("span", known.issue, class_="badge warn"), known.title),
            element("dl", [(element("dt", name), element("dd", text)) for name, text in pairs], class_="pairs"),
            class_="card",
        )


def _items(comparison: Comparison) -> Content:
    shown = _shown(comparison.at_first)
    where = f"in the event of the first difference, between {comparison.one} and {comparison.other}"
    said = f"{len(comparison.at_first):,} values differ {where}. Each rank's are in order of execution."
    left = len(comparison.at_first) - len(shown)
    if left:
        said += f" Of these {left:,} are left out here; report.json has them."
    groups = [group for group, _ in differing(comparison)]
    options = [element("option", "all groups", value=""), [element("option", g, value=g) for g in groups]]
    names = ("rank", "group", "item", comparison.one, comparison.other)
    rows = [
        element(
            "tr",
            element("td", d.rank, data_label="rank", class_="right"),
            element("td", d.group),
            element("td", element("code", d.item)),
            _value(comparison.one, d.one),
            _value(comparison.other, d.other),
            data_group=d.group,
        )
        for d in shown
    ]
    return [
        element("p", said, class_="note"),
        element(
            "div",
            element("input", type="search", placeholder="filter by rank, item or value", aria_label="filter rows"),
            element("select", options, aria_label="group"),
            element("output", class_="note"),
            class_="filter", hidden=True,
        ),
        _table(names, rows, "items stack", "items that differ", right=(0,)),
    ]  # fmt: skip


def _shown(differences: Sequence[Difference]) -> Sequence[Difference]:
    """As many as the page bears: of every rank its first ones."""
    if len(differences) <= _MAX_ITEMS:
        return differences
    by_rank = [list(of) for _, of in groupby(differences, key=lambda d: d.rank)]
    share = max(1, _MAX_ITEMS // len(by_rank))
    return [d for of in by_rank for d in of[:share]][:_MAX_ITEMS]


def _value(arm: str, value: object) -> Markup:
    short = value_text(value, _MAX_VALUE)
    whole = value_text(value, 10 * _MAX_VALUE) if len(short) == _MAX_VALUE else None
    return element("td", element("code", short), data_label=arm, class_="value", title=whole)


def _table(names: Sequence[str], rows: Content, style: str, label: str, *, right: Sequence[int] = ()) -> Markup:
    head = [element("th", n, scope="col", class_="right" if i in right else None) for i, n in enumerate(names)]
    table = element("table", element("thead", element("tr", head)), element("tbody", rows), class_=style)
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def _comparisons(found: Verification) -> Markup:
    rows = [
        element(
            "tr",
            element("th", f"{c.one} and {c.other}", scope="row"),
            element("td", c.question, class_="note"),
            element("td", steps_text(c.steps), class_="fixed"),
            element("td", c.ranks, class_="right", data_label="ranks"),
            element("td", f"{c.values:,}", class_="right", data_label="values"),
            element(
                "td", element("span", answer(c), class_=f"tone {'good' if c.first is None else 'bad'}"), class_="fixed"
            ),
        )
        for c in found.comparisons
    ]
    observed = [element("h4", "items observed on rank 0"), _tags(found.observed)] if found.observed else None
    names = ("arms", "question", "steps", "ranks", "values", "answer")
    return joined([_table(names, rows, "stack", "comparisons", right=(3, 4)), observed])


def _excused(found: Verification) -> Content:
    cards = [
        element(
            "li",
            element("h3", element("span", excused.rule, class_="badge"), f"{c.one} and {c.other}"),
            element("p", excused.why),
            element("p", f"{excused.count:,} values, {ranks_text(excused.ranks)}, {steps_text(excused.steps)}: ",
                    element("code", _names(excused.items)), class_="note"),
            class_="card",
        )
        for c in found.comparisons
        for excused in c.excused
    ]  # fmt: skip
    intro = "Differences that a rule explains. They do not count in the verdict."
    return [element("p", intro, class_="note"), element("ul", cards, class_="cards")] if cards else None


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _listed(texts: Sequence[str]) -> Content:
    if not texts:
        return None
    return [
        element("p", "What is not listed here was compared.", class_="note"),
        element("ul", [element("li", text) for text in texts], class_="chain"),
    ]


# What was run


def _arm(arm: ArmRun) -> Markup:
    good = arm.problem is None
    said = [("log", arm.log), ("folder", arm.folder)]
    return element(
        "li",
        element(
            "div",
            element("h3", arm.name),
            element("span", arm.purpose, class_="note purpose"),
            element("span", f"{arm.seconds:,.1f} s", class_="right"),
            element("span", ending(arm), class_=f"tone {'good' if good else 'bad'}"),
            class_="head",
        ),
        None if good else element("p", arm.problem),
        element(
            "details",
            element("summary", "command line"),
            element("pre", _command(arm), class_="command", tabindex=0),
            element(
                "dl", [(element("dt", n), element("dd", element("code", t))) for n, t in said], class_="pairs note"
            ),
        ),
    )


def _command(arm: ArmRun) -> Markup:
    """The line for a shell, one flag with its values on each line."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in arm.environment]
    row: list[str] = []
    for word in arm.command:
        if word.startswith("-") and row:
            lines.append(" ".join(row))
            row = []
        row.append(shlex.quote(word))
    return Markup(" \\\n    ".join(joined(line) for line in [*lines, " ".join(row)]))


def _settings(found: Verification) -> Content:
    rows = [
        element(
            "tr",
            element("th", element("code", s.name), scope="row"),
            element("td", element("code", "not set" if s.found is None else s.found), data_label="is"),
            element("td", element("code", s.wanted), data_label="should be"),
            element("td", s.why),
            element(
                "td",
                f"{s.severity}; {'--fix-env sets it' if s.fix == 'variable' else 'add it to the line'}",
                class_="fixed",
            ),
        )
        for s in found.settings
    ]
    names = ("setting", "is", "should be", "why", "what to do")
    return _table(names, rows, "stack", "settings that are not as they should be") if rows else None


def _facts(found: Verification) -> Content:
    if not found.facts:
        return None
    rows, long = [], []
    for name, value in found.facts.items():
        text = _fact(value)
        if len(text) <= 160:
            rows.append((element("dt", name), element("dd", text)))
        else:
            whole = json.dumps(value, indent=1, default=str)
            cut = (
                whole if len(whole) <= _MAX_FACT else f"{whole[:_MAX_FACT]}\n… {len(whole) - _MAX_FACT} more characters"
            )
            long.append(
                element("details", element("summary", name), element("pre", _lines(cut.splitlines()), tabindex=0))
            )
    return [element("dl", rows, class_="pairs"), long]


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_fact(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_fact, value))
    return str(value)
