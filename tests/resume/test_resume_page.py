"""report.html of verify-resume: what it holds, and how it behaves in a headless Chromium."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import verifications
from chromium import MISSING, Browser, chromium

from ckptguard.core.watching import GROUPS
from ckptguard.report.rank_map import CODES, class_of, grid_of
from ckptguard.report.resume_page import page
from ckptguard.report.resume_style import GROUP_COLOURS, STYLE
from ckptguard.resume.results import Curve, Verification

_CONTRAST = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const light = colour => {
  const [r, g, b] = rgb(colour).slice(0, 3).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = element => {
  for (let e = element; e; e = e.parentElement) {
    if (e.classList.contains("code")) return getComputedStyle(e.previousElementSibling).fill;
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
};
const weak = [];
for (const element of document.querySelectorAll("body *")) {
  const said = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (!said || !element.getClientRects().length || element.closest("title, script, option, .swatch")) continue;
  const style = getComputedStyle(element), colour = element.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(colour), light(ground(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) weak.push(element.outerHTML);
}
return weak;
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if MISSING:
        pytest.skip(f"{MISSING} (Debian packages chromium and chromium-driver)")
    with chromium() as session:
        yield session


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Callable[..., Browser]:
    """Opens the page of a verification; fails if it says anything to the console or asks for anything."""

    def show(verification: Verification, **how: Any) -> Browser:
        path = tmp_path / "report.html"
        path.write_text(page(verification), encoding="utf-8")
        browser.open(path, **how)
        assert browser.log("browser") == []
        assert browser.requests() == [path.as_uri()]
        return browser

    return show


# In a browser


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", verifications.ALL)
def test_is_readable(shown: Callable[..., Browser], name: str, dark: bool) -> None:
    found = verifications.ALL[name]()
    browser = shown(found, width=1400, dark=dark)
    assert browser.run("return document.querySelector('h1').innerText").split(" ", 1)[1].lower() == found.word
    assert browser.run("return document.querySelector('.sentence').innerText").split() == found.sentence.split()
    browser.run("for (const e of document.querySelectorAll('details')) e.open = true")
    for width in (1400, 400):
        browser.resize(width)
        assert browser.run("return [innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert browser.run(_CONTRAST) == []
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(16, 19, 24)" if dark else "rgb(255, 255, 255)")


def test_curves_lie_over_each_other(shown: Callable[..., Browser]) -> None:
    browser = shown(verifications.module_fault())
    first = "document.querySelector('#curves .chart')"
    assert browser.run(f"return [...{first}.querySelectorAll('.legend li')].map(e => e.innerText.trim())") == [
        "reference", "repeat", "save", "resume",
    ]  # fmt: skip
    widths = (
        f"return [...{first}.querySelectorAll('.lines .arm')].map(e => parseFloat(getComputedStyle(e).strokeWidth))"
    )
    assert browser.run(widths) == [7, 1.75, 1.75, 1.75]
    assert browser.run(f"return {first}.querySelector('.save-label').textContent") == "saved after step 10"
    assert browser.run(f"return {first}.querySelector('.dots').getAttribute('d').split('M').length - 1") == 8
    assert "resume differs from reference at 8 of 10 steps, first at 13" in browser.run(f"return {first}.innerText")
    assert browser.run("return document.querySelectorAll('#curves .folded .chart').length") == 1


def test_values_are_shown_under_the_pointer(shown: Callable[..., Browser]) -> None:
    found = verifications.module_fault()
    browser = shown(found)
    browser.run("""
        const area = document.querySelector('.area[data-curve]'), box = area.getBoundingClientRect();
        const at = {bubbles: true, clientX: box.left + box.width * 13.5 / 20, clientY: box.top + 20};
        area.dispatchEvent(new PointerEvent('pointermove', at));""")
    said = browser.run("return document.querySelector('.tip').innerText").split("\n")
    values = {curve.arm: dict(curve.points).get(14) for curve in found.curves if curve.name == "loss lm loss"}
    assert said == ["step 14", *(f"{arm} {value!r}" for arm, value in values.items() if value is not None)]


def test_the_map_has_a_cell_for_every_rank_and_step(shown: Callable[..., Browser]) -> None:
    found = verifications.module_fault()
    browser = shown(found)
    assert browser.run("return document.querySelectorAll('.map .cell').length") == 4 * 10
    differing = found.comparisons[-1].cells
    assert browser.run("return document.querySelectorAll('.map .cell:not(.same)').length") == len(differing)
    titles = browser.run("return [...document.querySelectorAll('.map .cell title')].map(e => e.textContent)")
    assert titles[2 * 10 + 2] == "rank 2, step 13: 16 values, first loss"
    assert titles[0] == "rank 0, step 11: equal"
    say = "document.querySelectorAll('.map .cell')[22].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
    assert browser.run(f"{say} return document.querySelector('.readout').innerText") == titles[22]
    assert browser.run("return document.querySelectorAll('.map .code').length") == len(differing)


def test_the_map_of_many_ranks(shown: Callable[..., Browser]) -> None:
    browser = shown(verifications.many_ranks())
    assert browser.run("return [...document.querySelectorAll('.map')].map(m => m.querySelectorAll('.cell').length)") == [
        64, 64 * 10,
    ]  # fmt: skip
    assert browser.run("return document.querySelectorAll('.map .cell.g-optimizer').length") == 8


def test_items_are_filtered(shown: Callable[..., Browser]) -> None:
    browser = shown(verifications.module_fault())

    def filtered(text: str, group: str = "") -> tuple[int, str]:
        browser.run(
            """const [text, group] = document.querySelectorAll('.filter input, .filter select');
            text.value = arguments[0]; group.value = arguments[1];
            text.dispatchEvent(new Event('input')); group.dispatchEvent(new Event('change'));""",
            text, group,
        )  # fmt: skip
        rows = "[...document.querySelectorAll('#items tbody tr')].filter(row => row.getClientRects().length)"
        return browser.run(f"return [{rows}.length, document.querySelector('.filter output').value]")

    assert filtered("") == [14, "14 of 14 rows"]
    assert filtered("layers.1 FC2") == [1, "1 of 14 rows"]
    assert filtered("", "optimizer") == [4, "4 of 14 rows"]
    assert filtered("layers.1", "optimizer") == [1, "1 of 14 rows"]
    assert filtered("nothing has this") == [0, "0 of 14 rows"]


def test_commands_can_be_copied_into_a_shell(shown: Callable[..., Browser]) -> None:
    found = verifications.equal()
    browser = shown(found)
    said = browser.run("return [...document.querySelectorAll('pre.command')].map(e => e.textContent)")
    assert [shlex.split(text.replace("\\\n", " ")) for text in said] == [
        [*(f"{name}={value}" for name, value in arm.environment), *arm.command] for arm in found.arms
    ]
    assert browser.run("return document.querySelectorAll('button.copy').length") == len(found.arms)


def test_is_whole_without_scripts(shown: Callable[..., Browser]) -> None:
    browser = shown(verifications.module_fault(), scripts=False)
    nodes = browser.devtools("DOM.getDocument", depth=-1)["root"]["nodeId"]

    def count(selector: str) -> int:
        return len(browser.devtools("DOM.querySelectorAll", nodeId=nodes, selector=selector)["nodeIds"])

    assert count("#items tbody tr:not([hidden])") == 14
    assert count(".filter[hidden]") == 1
    assert count("button, .tip") == 0
    assert count("#curves details table") == 3


def test_hostile_text_stays_text(shown: Callable[..., Browser]) -> None:
    browser = shown(_everywhere(verifications.state_fault(), "</script><img src=x onerror=alert(1)>\"'&\x1b[31m"))
    assert browser.run("return document.querySelectorAll('img, iframe, object').length") == 0
    assert "<img src=x" in browser.run("return document.querySelector('.sentence').innerText")


def test_a_script_that_is_not_ours_does_not_run(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    bad = '<script>window.ran = 1</script><img src="http://127.0.0.1:9/x.png"><p style="color: red">'
    path.write_text(page(verifications.equal()).replace("</main>", f"{bad}</main>"), encoding="utf-8")
    browser.open(path)
    assert browser.run("return window.ran") is None
    said = [entry["message"] for entry in browser.log("browser")]
    for kind in ("script-src", "img-src", "style-src"):
        assert any(kind in text and "Content Security Policy" in text for text in said), (kind, said)


# As text


class _Elements(HTMLParser):
    """All elements, and whether every one is closed in order."""

    _VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self._VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def values(self, tag: str, attribute: str) -> list[str | None]:
        return [attrs[attribute] for name, attrs in self.found if name == tag and attribute in attrs]


def _everywhere(value: Any, text: str) -> Any:
    """The same value with that text in front of every name and sentence in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {"word", "kind", "group", "sort", "severity", "fix"}
        changed = {
            f.name: _everywhere(getattr(value, f.name), text) for f in dataclasses.fields(value) if f.name not in kept
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, tuple):
        return tuple(_everywhere(item, text) for item in value)
    if isinstance(value, dict):
        return {text + key: _everywhere(item, text) for key, item in value.items()}
    return text + value if isinstance(value, str) and value not in GROUPS else value


@functools.cache
def _elements(name: str) -> _Elements:
    return _Elements(page(verifications.ALL[name]()))


@pytest.mark.parametrize("name", verifications.ALL)
def test_is_one_file_of_sound_markup(name: str) -> None:
    elements = _elements(name)
    assert [tag for tag, _ in elements.found].count("h1") == 1
    for attribute in ("src", "href", "action", "srcset", "data", "poster"):
        assert all(v is None or v.startswith("#") or v == "data:," for tag in ("a", "link", "img", "script", "use", "form")
                   for v in elements.values(tag, attribute))  # fmt: skip
    assert not any(name == "style" or name.startswith("on") for _, attrs in elements.found for name in attrs)
    ids = [attrs["id"] for _, attrs in elements.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {v[1:] for v in elements.values("a", "href") if v} <= set(ids)
    assert all(scope in ("col", "row") for scope in elements.values("th", "scope"))
    assert len(elements.values("th", "scope")) == sum(tag == "th" for tag, _ in elements.found)
    text = page(verifications.ALL[name]())
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_hostile_text_makes_no_elements() -> None:
    plain = _elements("state_fault").found
    hostile = _Elements(
        page(_everywhere(verifications.state_fault(), "</pre></script><b a=\"'>&lt;\x00\x1b[31m"))
    ).found
    assert {tag for tag, _ in hostile} <= {tag for tag, _ in plain} | {"pre"}  # facts with long names are folded


def test_every_group_has_a_code_and_a_colour() -> None:
    assert set(CODES) == set(GROUP_COLOURS) == set(GROUPS)
    assert len(set(CODES.values())) == len(set(GROUP_COLOURS.values())) == len(GROUPS)
    for group, colour in GROUP_COLOURS.items():
        assert f".{class_of(group)} {{" in STYLE
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        assert 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) >= 4.5, group  # white codes on it


def test_thousands_of_ranks_and_steps_stay_small() -> None:
    huge = verifications.many_ranks(4096, 1000, 40)
    text = page(huge)
    assert len(text.encode()) < 2_000_000
    assert text.count("data-group=") == 3 * 512  # of every rank as many
    assert "20,480 values differ in the event" in text
    assert "Of these 18,944 are left out here" in text
    grid = grid_of(huge.comparisons[-1])
    assert grid.rows == 64
    assert grid.rows * grid.columns <= 4000
    assert sum(band.cells for band in grid.bands.values()) == len(huge.comparisons[-1].cells)
    assert sum(band.values for band in grid.bands.values()) == sum(cell[2] for cell in huge.comparisons[-1].cells)


def test_of_many_differences_every_rank_has_some() -> None:
    ranks = set(re.findall(r'<td data-label="rank" class="right">(\d+)', page(verifications.many_ranks(512, 20, 60))))
    assert ranks == {str(rank) for rank in range(64, 128)}


def test_bands_know_the_first_group_of_their_lowest_step() -> None:
    cells = ((1, 12, 5, "loss"), (0, 11, 1, "parameter"), (1, 11, 2, "batch"), (129, 11, 3, "rng"))
    grid = grid_of(dataclasses.replace(verifications.repeats(), steps=(11, 14), ranks=130, cells=cells), most_cells=44)
    assert (grid.per_row, grid.rows, grid.columns, grid.per_column) == (3, 44, 1, 4)
    assert grid.ranks_of(43) == (129, 129)
    assert (grid.bands[0, 0].cells, grid.bands[0, 0].values, grid.bands[0, 0].group) == (3, 8, "batch")
    assert grid.bands[43, 0].group == "rng"


def test_values_that_are_not_finite_break_the_line() -> None:
    points = ((1, 3.0), (2, 2.0), (3, math.nan), (4, math.inf), (5, 1.0))
    curves = (
        Curve("reference", "loss lm loss", points),
        Curve("resume", "loss lm loss", (*points[:4], (5, -math.inf))),
    )
    text = page(dataclasses.replace(verifications.equal(), curves=curves))
    assert "reference is not finite at 2 steps, first at 3" in text
    assert "resume differs from reference at 1 of 5 steps, first at 5, by at most inf" in text
    assert "NaN" not in "".join(re.findall(r' d="([^"]*)"', text))
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', text))


def test_little_is_shown_where_little_was_found() -> None:
    nothing = Verification(
        word="failed", sentence="The arm 'reference' wrote nothing.", steps=2, saved_at=(), facts={}, settings=(), arms=(),
        comparisons=(), culprits=(), chain=(), known=(), curves=(Curve("reference", "loss", ((1, 2.0),)),), unobserved=(),
        observed=(), stored_bytes_per_rank_step=0,
    )  # fmt: skip
    assert [attrs["id"] for tag, attrs in _Elements(page(nothing)).found if tag == "section"] == ["curves"]


def test_long_facts_are_folded_and_cut() -> None:
    facts = {"args": {f"argument_{n}": n for n in range(5000)}, "world_size": 4}
    text = page(dataclasses.replace(verifications.equal(), facts=facts))
    assert "<summary>args</summary>" in text
    assert "more characters" in text
    assert "argument_4999" not in text
