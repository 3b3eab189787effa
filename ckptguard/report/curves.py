"""Curves of several arms over each other, and how far each is from the first on a logarithmic scale, as HTML with SVG.

Lines stand in an SVG that is stretched to the width of the page; text beside it keeps its size. Positions are in per cent of
the plot, or in thousandths within the stretched SVG.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptguard.report.markup import Markup, element, joined
from ckptguard.resume.results import Curve

type Points = Sequence[tuple[int, float]]

_STYLES = {"repeat": "second", "save": "third", "resume": "fourth"}  # the first arm's is "first", any other's "fifth"
_MAX_POINTS, _MAX_ROWS = 1000, 120
_CROWD = 120  # points beyond which dots are drawn smaller
_HEIGHT, _LOW_HEIGHT = 220, 120
_HIGHEST, _LOWEST, _EQUAL = 70, 780, 930  # thousandths: decades of the lower chart, and its lane for equal values


def curve_figures(curves: Sequence[Curve], saved_at: Sequence[int]) -> Iterator[Markup]:
    """One figure for every name: losses, the gradient norm and what differs; all others, folded away, after them.

    The first arm of each name is what its others are held against.
    """
    folded = []
    for number, name in enumerate(dict.fromkeys(curve.name for curve in curves)):
        arms = {curve.arm: curve.points for curve in curves if curve.name == name and curve.points}
        if not arms:
            continue
        figure = _figure(f"curve-{number}", name, arms, saved_at)
        if name.startswith("loss ") or "grad norm" in name or _differs(arms):
            yield figure
        else:
            folded.append(figure)
    if folded:
        said = f"{len(folded)} more, equal in all arms" if len(folded) > 1 else "one more, equal in all arms"
        yield element("details", element("summary", said), folded, class_="folded")


def _differs(arms: Mapping[str, Points]) -> bool:
    reference, *others = arms.values()
    base = dict(reference)
    return any(step in base and _apart(base[step], value) for points in others for step, value in points)


def _figure(key: str, name: str, arms: Mapping[str, Points], saved_at: Sequence[int]) -> Markup:
    reference, *others = arms
    base = dict(arms[reference])
    apart = {arm: [(s, _apart(base[s], v)) for s, v in arms[arm] if s in base] for arm in others}
    first, last = _span(step for points in arms.values() for step, _ in points)
    low, high = _span(v for points in arms.values() for _, v in points if math.isfinite(v))
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    scale = _Scale(first, last, low - margin, high + margin)
    styles = {arm: "first" if arm == reference else _STYLES.get(arm, "fifth") for arm in arms}
    lines = [
        element("path", d=scale.path(_thinned(points)), class_=f"arm {styles[arm]}") for arm, points in arms.items()
    ]
    return element(
        "figure",
        element("figcaption", element("h3", _titled(name)), _legend(styles)),
        _plot(scale, lines, saved_at, _ticks(scale.low, scale.high), f"{name} of {', '.join(arms)} by step", key=key),
        _differences(scale, apart, styles, saved_at, reference),
        [element("p", text, class_="note") for text in _said(arms, apart, reference)],
        _table(arms, apart),
        _data(key, arms),
        class_="chart",
    )


def _titled(name: str) -> str:
    """``loss lm loss`` is the item's whole name: its group and its own."""
    return name.split(" ", 1)[-1]


class _Scale:
    """From steps and values to thousandths of the plot."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self.first, self.last, self.low, self.high = first, last, low, high

    def x(self, step: float) -> float:
        return 1000 * (step - self.first + 0.5) / (self.last - self.first + 1)

    def y(self, value: float) -> float:
        return 1000 * (self.high - value) / ((self.high - self.low) or 1.0)

    def path(self, points: Points) -> str:
        """A line that breaks where values are not finite; a lone point is a dot."""
        said, pen = [], "M"
        for step, value in points:
            if not math.isfinite(value):
                pen = "M"
                continue
            said.append(f"{pen}{self.x(step):.1f} {self.y(value):.1f}" + ("h.01" if pen == "M" else ""))
            pen = "L"
        return "".join(said)


def _thinned(points: Points) -> Points:
    """At most that many points; of neighbours that fall together the lowest and the highest stay."""
    if len(points) <= _MAX_POINTS:
        return points
    width = math.ceil(2 * len(points) / _MAX_POINTS)
    kept = set()
    for start in range(0, len(points), width):
        part = range(start, min(start + width, len(points)))
        kept |= {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def _plot(
    scale: _Scale,
    lines: Iterable[Markup],
    saved_at: Sequence[int],
    ticks: Iterable[tuple[float, str]],
    label: str,
    *,
    key: str | None = None,
    height: int = _HEIGHT,
) -> Markup:
    ticks = list(ticks)
    marks = [s for s in saved_at if scale.first <= s <= scale.last]
    grid = [element("path", d=f"M0 {scale.y(value):.1f}h1000", class_="rule") for value, _ in ticks]
    saves = [element("path", d=f"M{_after(scale, s):.1f} 0v1000", class_="save-mark") for s in marks]
    return element(
        "div",
        element(
            "svg",
            [element("text", text, x="100%", y=_percent(scale.y(value)), dy="0.32em") for value, text in ticks],
            class_="values", height=height, aria_hidden="true",
        ),
        element(
            "div",
            element(
                "svg", element("title", label), grid, saves, lines,
                class_="lines", viewBox="0 0 1000 1000", preserveAspectRatio="none", height=height, role="img",
            ),
            class_="area", data_curve=key, data_first=scale.first, data_last=scale.last,
        ),
        element("span", "step", class_="axis", aria_hidden="true"),
        element("svg", _steps(scale), class_="steps", height=18, aria_hidden="true"),
        element("svg", _save_labels(scale, marks), class_="steps", height=18, aria_hidden="true") if marks and key else None,
        class_="plot",
    )  # fmt: skip


def _after(scale: _Scale, step: int) -> float:
    """Between the step after which was saved and the next."""
    return (scale.x(step) + scale.x(step + 1)) / 2


def _steps(scale: _Scale) -> Iterator[Markup]:
    every = rounded_up((scale.last - scale.first + 1) / 8)
    for step in range(math.ceil(scale.first / every) * every, int(scale.last) + 1, every):
        anchor = "end" if scale.x(step) > 980 else "middle"
        yield element("text", step, x=_percent(scale.x(step)), y=13, text_anchor=anchor)


def rounded_up(count: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while count > 5 * power:
        power *= 10
    return next(n * power for n in (1, 2, 5) if n * power >= count)


def _save_labels(scale: _Scale, marks: Sequence[int]) -> Iterator[Markup]:
    for step in marks:
        place = _after(scale, step)
        anchor = "end" if place > 800 else "start" if place < 200 else "middle"
        yield element(
            "text", f"saved after step {step}", x=_percent(place), y=13, class_="save-label", text_anchor=anchor
        )


def _percent(thousandths: float) -> str:
    return f"{thousandths / 10:.2f}%"


def _legend(styles: Mapping[str, str]) -> Markup:
    def key(style: str) -> Markup:
        return element(
            "svg", element("path", d="M2 6h24", class_=f"arm {style}"), width=28, height=12, aria_hidden="true"
        )

    return element("ul", [element("li", key(style), arm) for arm, style in styles.items()], class_="legend")


def _apart(one: float, other: float) -> float:
    """How far; 0 also for two values that are not numbers, infinite if only one is."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf


def _differences(
    scale: _Scale,
    apart: Mapping[str, Points],
    styles: Mapping[str, str],
    saved_at: Sequence[int],
    reference: str,
) -> Markup | None:
    """The lower chart: one dot a step and arm; None if nothing differs."""
    found = [math.log10(d) for points in apart.values() for _, d in points if 0 < d < math.inf]
    if not found:
        return None
    low, high = math.floor(min(found)), math.floor(max(found)) + 1
    decade = (_LOWEST - _HIGHEST) / (high - low)
    lower = _Scale(scale.first, scale.last, high + (_HIGHEST - 1000) / decade, high + _HIGHEST / decade)
    zero = high - (_EQUAL - _HIGHEST) / decade
    dots = []
    for arm, points in apart.items():
        for kind, of in (("same", [(s, zero) for s, d in points if d == 0]),
                         ("dots", [(s, math.log10(d)) for s, d in points if 0 < d < math.inf])):  # fmt: skip
            d = "".join(f"M{lower.x(s):.1f} {lower.y(v):.1f}h.01" for s, v in _thinned(of))
            crowd = " crowd" if len(points) > _CROWD else ""
            dots.append(element("path", d=d, class_=f"{kind}{crowd} {styles[arm]}") if d else None)
    step = max(1, math.ceil((high - low) / 4))
    ticks = [*((float(e), f"1e{e:+d}") for e in range(high, low - 1, -step)), (zero, "equal")]
    return joined(
        [
            element("h4", f"distance from {reference}"),
            _plot(
                lower, [d for d in dots if d], saved_at, ticks, f"distance from {reference} by step, logarithmic",
                height=_LOW_HEIGHT,
            ),
        ]
    )  # fmt: skip


def _said(arms: Mapping[str, Points], apart: Mapping[str, Points], reference: str) -> Iterator[str]:
    """What the charts show, in words."""
    for arm, points in apart.items():
        off = [(s, d) for s, d in points if d]
        if off:
            most = max(d for _, d in off)
            share = f"{len(off)} of {len(points)} steps, first at {off[0][0]}"
            yield f"{arm} differs from {reference} at {share}, by at most {most:.3g}."
    same = [arm for arm, points in apart.items() if points and not any(d for _, d in points)]
    if same:
        yield f"Equal to {reference} at every step they share: {', '.join(same)}."
    for arm, points in arms.items():
        bad = [s for s, v in points if not math.isfinite(v)]
        if bad:
            yield f"{arm} is not finite at {len(bad)} steps, first at {bad[0]}; no line is drawn there."


def _table(arms: Mapping[str, Points], apart: Mapping[str, Points]) -> Markup:
    """The values themselves: all, or those around the first difference."""
    values = {arm: dict(points) for arm, points in arms.items()}
    steps = sorted({step for points in values.values() for step in points})
    first = min((s for points in apart.values() for s, d in points if d), default=steps[0])
    start = max(0, min(steps.index(first) - _MAX_ROWS // 4, len(steps) - _MAX_ROWS))
    shown = steps[start : start + _MAX_ROWS]
    left = len(steps) - len(shown)
    head = element("tr", element("th", "step", scope="col"), [element("th", arm, scope="col") for arm in arms])
    off = {(arm, step) for arm, points in apart.items() for step, distance in points if distance}
    rows = [
        element(
            "tr",
            element("th", step, scope="row"),
            [
                element("td", _number(values[arm].get(step)), class_="off" if (arm, step) in off else None)
                for arm in arms
            ],
        )
        for step in shown
    ]
    table = element("table", element("thead", head), element("tbody", rows), class_="numbers")
    said = f"values by step ({left} steps are left out; report.json has all)" if left else "values by step"
    return element(
        "details",
        element("summary", said),
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label="values by step"),
    )


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)


def _data(key: str, arms: Mapping[str, Points]) -> Markup:
    """What is shown under the pointer."""
    plain = {arm: [[s, _number(v)] for s, v in _thinned(points)] for arm, points in arms.items()}
    text = json.dumps(plain, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{key}-data">{text}</script>')


def _span(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return (min(found), max(found)) if found else (0.0, 1.0)


def _ticks(low: float, high: float) -> Iterator[tuple[float, str]]:
    """Four or so round values between the two."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    width = max(n * power for n in (1, 2, 5, 10) if n * power <= 1.3 * rough)
    for count in range(math.ceil(low / width), math.floor(high / width) + 1):
        yield count * width, f"{count * width:.6g}"
