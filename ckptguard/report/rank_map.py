"""Where two arms differ, as a grid of ranks by steps; many ranks or steps share a cell, so that the grid stays small."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptguard.core.watching import GROUPS, Group
from ckptguard.report.curves import rounded_up
from ckptguard.report.markup import Markup, element
from ckptguard.report.words import steps_text
from ckptguard.resume.results import Comparison

CODES: Mapping[Group, str] = {
    "counter": "ct", "rng at begin": "rb", "batch": "ba", "loss": "lo", "gradient": "gr", "metric": "me", "scaler": "sc",
    "master": "ma", "optimizer": "op", "parameter": "pa", "buffer": "bu", "unsaved buffer": "ub", "extra state": "ex",
    "param group": "pg", "scheduler": "sd", "rng": "rn", "other": "ot",
}  # fmt: skip
_MAX_ROWS, _MAX_COLUMNS, _MAX_CELLS = 64, 100, 4000
_MAX_DRAWN_EQUAL = 1600  # beyond it cells without a difference are the grid's ground


@dataclass(frozen=True, slots=True)
class Band:
    """What one cell of the grid stands for.

    Attributes:
        cells: How many (rank, step) in it differ.
        values: How many values differ in these.
        group: The first that does, of the lowest step.
    """

    cells: int
    values: int
    group: Group


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks by steps in bands.

    Attributes:
        ranks: How many there are.
        steps: First and last, both shown.
        per_row: Ranks that share a row.
        per_column: Steps that share a column.
        bands: By (row, column), where something differs.
    """

    ranks: int
    steps: tuple[int, int]
    per_row: int
    per_column: int
    bands: Mapping[tuple[int, int], Band]

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return math.ceil(self.ranks / self.per_row)

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return math.ceil((self.steps[1] - self.steps[0] + 1) / self.per_column)

    @property
    def flat(self) -> bool:
        """Whether it is a single state, whose ranks are drawn side by side."""
        return self.columns == 1

    @property
    def across(self) -> int:
        """Cells side by side."""
        return self.rows if self.flat else self.columns

    @property
    def down(self) -> int:
        """Cells below each other."""
        return 1 if self.flat else self.rows

    def ranks_of(self, row: int) -> tuple[int, int]:
        """First and last rank of a row."""
        return row * self.per_row, min((row + 1) * self.per_row, self.ranks) - 1

    def steps_of(self, column: int) -> tuple[int, int]:
        """First and last step of a column."""
        first = self.steps[0] + column * self.per_column
        return first, min(first + self.per_column - 1, self.steps[1])


def grid_of(comparison: Comparison, most_cells: int = _MAX_CELLS) -> Grid:
    """The comparison's cells in a grid of at most that many."""
    steps = [*comparison.steps, *(step for _, step, _, _ in comparison.cells)]
    first, last = min(steps), max(steps)
    ranks = max(comparison.ranks, 1 + max((rank for rank, *_ in comparison.cells), default=0))
    per_row = math.ceil(ranks / _MAX_ROWS)
    columns = max(1, min(_MAX_COLUMNS, most_cells // math.ceil(ranks / per_row)))
    per_column = math.ceil((last - first + 1) / columns)
    order = {group: number for number, group in enumerate(GROUPS)}
    found: dict[tuple[int, int], list[int]] = {}  # cells, values, lowest step, its first group
    for rank, step, count, group in comparison.cells:
        sums = found.setdefault((rank // per_row, (step - first) // per_column), [0, 0, step, len(order)])
        sums[0] += 1
        sums[1] += count
        if step < sums[2] or (step == sums[2] and order[group] < sums[3]):
            sums[2:] = step, order[group]
    bands = {place: Band(cells, values, GROUPS[group]) for place, (cells, values, _, group) in found.items()}
    return Grid(ranks, (first, last), per_row, per_column, bands)


def map_figure(comparison: Comparison, saved_at: Sequence[int], most_cells: int = _MAX_CELLS) -> Markup:
    """The grid with its legend; what a cell stands for is its title. A single state is one row, its ranks side by side."""
    grid = grid_of(comparison, most_cells)
    height = next(h for rows, h in ((8, 26), (16, 20), (32, 14), (_MAX_ROWS, 9)) if grid.down <= rows)
    area = element(
        "svg",
        element("title", f"where {comparison.one} and {comparison.other} differ: ranks by steps"),
        element("rect", width="100%", height=grid.down * height, class_="ground"),
        _cells(grid, height),
        _saves(grid, saved_at, grid.down * height),
        height=grid.down * height, role="img", class_="cells",
    )  # fmt: skip
    width = " few" if grid.across <= 4 else " some" if grid.across <= 12 else ""
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", f"{comparison.one} and {comparison.other}"),
            element("p", comparison.question, class_="note"),
            _legend(grid),
        ),
        element(
            "div",
            element("svg", _labels_beside(grid, height), class_="values", height=grid.down * height, aria_hidden="true"),
            element("div", area, class_="area"),
            element("span", "rank" if grid.flat else "step", class_="axis", aria_hidden="true"),
            element("svg", _labels_below(grid), class_="steps", height=18, aria_hidden="true"),
            class_=f"plot map{width}",
        ),
        element("p", _summary(grid), class_="note readout"),
        class_="chart",
    )  # fmt: skip


def _cells(grid: Grid, height: int) -> Iterator[Markup]:
    width = 100 / grid.across
    everything = grid.rows * grid.columns <= _MAX_DRAWN_EQUAL
    written = grid.down <= 16 and grid.across <= 24
    for row in range(grid.rows):
        for column in range(grid.columns):
            band = grid.bands.get((row, column))
            if band is None and not everything:
                continue
            right, down = (row, 0) if grid.flat else (column, row)
            yield element(
                "rect", element("title", _meaning(grid, row, column, band)),
                x=f"{right * width:.4g}%", y=down * height, width=f"{width:.4g}%", height=height,
                class_=f"cell {class_of(band.group) if band else 'same'}",
            )  # fmt: skip
            if band is not None and written:
                middle = f"{(right + 0.5) * width:.4g}%"
                yield element("text", CODES[band.group], x=middle, y=(down + 0.5) * height, dy="0.35em", class_="code")


def class_of(group: str) -> str:
    """The style of a group."""
    return f"g-{group.replace(' ', '-')}"


def _meaning(grid: Grid, row: int, column: int, band: Band | None) -> str:
    (first, last), steps = grid.ranks_of(row), grid.steps_of(column)
    where = f"{f'rank {first}' if first == last else f'ranks {first} to {last}'}, {steps_text(steps)}"
    if band is None:
        return f"{where}: equal"
    total = (last - first + 1) * (steps[1] - steps[0] + 1)
    share = "" if total == 1 else f"{band.cells} of {total} differ, "
    return f"{where}: {share}{band.values:,} value{'s' if band.values != 1 else ''}, first {band.group}"


def _summary(grid: Grid) -> str:
    cells, values = sum(b.cells for b in grid.bands.values()), sum(b.values for b in grid.bands.values())
    count = grid.steps[1] - grid.steps[0] + 1
    what = "ranks" if count == 1 else "rank steps"
    said = f"{cells:,} of {grid.ranks * count:,} {what} differ, in {values:,} value{'s' if values != 1 else ''}."
    if grid.per_row > 1:
        said += f" A {'cell' if grid.flat else 'row'} is {grid.per_row} ranks."
    if grid.per_column > 1:
        said += f" A column is {grid.per_column} steps."
    return said


def _saves(grid: Grid, saved_at: Sequence[int], height: int) -> Iterator[Markup]:
    for step in saved_at:
        if grid.steps[0] <= step < grid.steps[1]:
            place = f"{100 * (step + 1 - grid.steps[0]) / grid.per_column / grid.columns:.4g}%"
            yield element("line", x1=place, x2=place, y1=0, y2=height, class_="save-mark")


def _labels_beside(grid: Grid, height: int) -> Iterator[Markup]:
    every = max(1, math.ceil(14 / height))
    for row in range(0, grid.down, every):
        first = grid.ranks_of(row)[0]
        label = f"step {grid.steps[0]}" if grid.flat else f"rank {first}" if row == 0 else str(first)
        yield element("text", label, x="100%", y=(row + 0.5) * height, dy="0.35em")


def _labels_below(grid: Grid) -> Iterator[Markup]:
    """At most ten or so: ranks at powers of two, steps at round numbers."""
    firsts = [grid.ranks_of(i)[0] if grid.flat else grid.steps_of(i)[0] for i in range(grid.across)]
    if grid.flat:
        shown = firsts[:: 2 ** math.ceil(math.log2(max(1, grid.across / 10)))]
    elif grid.per_column == 1:
        every = rounded_up(grid.across / 10)
        shown = [first for first in firsts if first % every == 0]
    else:
        shown = firsts[:: math.ceil(grid.across / 8)]
    for place, first in enumerate(firsts):
        if first in shown:
            yield element("text", first, x=f"{100 * (place + 0.5) / grid.across:.4g}%", y=13)


def _legend(grid: Grid) -> Markup:
    found = {band.group for band in grid.bands.values()}
    keys = [(CODES[group], class_of(group), group) for group in GROUPS if group in found]
    return element(
        "ul",
        element("li", element("span", class_="swatch same"), "equal"),
        [
            element("li", element("span", code, class_=f"swatch {style}"), f"{group} first")
            for code, style, group in keys
        ],
        class_="legend",
    )
