"""Descriptions of all ranks of a pipeline stage from those of some of them. Pure.

The ranks of a stage are built alike: descriptions differ in offsets, in numbers within names (of experts), and in which
rank saves a copy. Where offsets and numbers are linear in a rank's place, and the rank that saves is the one whose place is 0
in some axes, a few descriptions say all: ``choose`` takes enough ranks that no two rules of this kind agree on them and not
on all. ``fit`` gives up if anything about them is otherwise.

A description is plain values as JSON has them; a place is the number of a rank in each of ``AXES``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

AXES = ("tp", "etp", "ep", "dense_dp", "expert_dp")
"""What sharding and replica ids depend on within a stage; data parallel numbers are of the smallest world."""

_SHARDING = 3  # of the axes; the others only decide who saves a copy
_MAY_DIFFER = frozenset({"key", "offset", "main", "objects"})
_NUMBER = re.compile(r"(\d+)")

Place = Mapping[str, int]


class _NoRuleError(Exception):
    """Descriptions differ otherwise than in ways that follow from a rank's place."""


def choose(places: Sequence[Place]) -> list[int]:
    """Positions of ranks whose descriptions determine those of all.

    Args:
        places: Of every rank of a stage, first rank first.

    Returns:
        In order; the first, second, middle and last of every axis that shards, one of each set of axes that are 0, and as
        many as are needed to tell the slopes of all axes apart.
    """
    grid = _grid(places)
    chosen = {0, len(places) - 1}
    for numbers in grid.T[:_SHARDING]:
        for number in (1, numbers.max() // 2, numbers.max()):
            chosen |= {int(n) for n in np.flatnonzero(numbers == number)[[0, -1]]} if number in numbers else set()
    chosen |= {int(n) for n in np.unique(grid == 0, axis=0, return_index=True)[1]}
    full = _rank_of(grid)
    for number in range(len(places)):
        have = _rank_of(grid[sorted(chosen)])
        if have == full:
            break
        if _rank_of(grid[[*sorted(chosen), number]]) > have:
            chosen.add(number)
    return sorted(chosen)


def fit(places: Sequence[Place], descriptions: Sequence[Any]) -> Any | None:
    """One description with rules in it, from which ``at_place`` makes that of every rank of the stage.

    Args:
        places: Of the ranks that ``choose`` took.
        descriptions: Theirs.

    Returns:
        Plain values, in which ``{"~linear": [value at 0, {axis: slope}]}`` is a number, ``{"~numbers": [text between them,
        numbers]}`` a text, and ``{"~zero": axes}`` whether a place is 0 in all these axes. None if no such rules give
        exactly these descriptions.
    """
    try:
        return _fit(list(descriptions), _Rules(places), may_differ=False)
    except _NoRuleError:
        return None


def at_place(fitted: Any) -> Callable[[Place], Any]:
    """Makes descriptions from a fitted one; what is the same at all places is shared among them, not copied."""
    return _maker(fitted) or (lambda _: fitted)


def _grid(places: Sequence[Place]) -> NDArray[np.int64]:
    """Places as int64, one a row."""
    return np.array([[place[axis] for axis in AXES] for place in places], np.int64)


def _rank_of(grid: NDArray[np.int64]) -> int:
    """Of the linear functions of a place with a constant term that differ on these places."""
    return int(np.linalg.matrix_rank(np.column_stack([np.ones(len(grid)), grid])))


class _Rules:
    """Finds the rule that gives a value at each of some places."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.grid = _grid(places)
        self._known: dict[tuple[int, ...], dict[str, int]] = {}

    @cached_property
    def _axes(self) -> list[int]:
        """Positions of axes that do not follow from those before them."""
        kept: list[int] = []
        for axis in range(len(AXES)):
            if _rank_of(self.grid[:, [*kept, axis]]) > _rank_of(self.grid[:, kept]):
                kept.append(axis)
        return kept

    def linear(self, values: Sequence[int]) -> dict[str, Any] | int:
        """Raises ``_NoRuleError`` unless whole slopes give exactly these values."""
        steps = tuple(value - values[0] for value in values)
        if not any(steps):
            return values[0]
        if steps not in self._known:
            moved = self.grid[:, self._axes] - self.grid[0, self._axes]
            slopes = np.rint(np.linalg.lstsq(moved.astype(np.float64), np.array(steps, np.float64))[0]).astype(np.int64)
            if not np.array_equal(moved @ slopes, np.array(steps)):
                raise _NoRuleError
            self._known[steps] = {AXES[a]: int(s) for a, s in zip(self._axes, slopes, strict=True) if s}
        rule = self._known[steps]
        base = values[0] - sum(slope * int(self.grid[0, AXES.index(axis)]) for axis, slope in rule.items())
        return {"~linear": [base, rule]}

    def zero(self, values: Sequence[bool]) -> dict[str, Any]:
        """Raises ``_NoRuleError`` unless there are axes that are all 0 exactly where a value is True."""
        true = np.array(values, np.bool_)
        axes = [a for a in range(len(AXES)) if not self.grid[true, a].any()]
        if not np.array_equal((self.grid[:, axes] == 0).all(axis=1), true):
            raise _NoRuleError
        return {"~zero": [AXES[a] for a in axes]}

    def numbers(self, values: Sequence[str]) -> dict[str, Any]:
        """Raises ``_NoRuleError`` unless these differ only in their numbers, linearly, and no number has leading zeros."""
        texts = [_NUMBER.split(value) for value in values]
        between = texts[0][::2]
        found = [[int(n) for n in text[1::2]] for text in texts]
        if any(
            text[::2] != between or text[1::2] != [str(n) for n in ns] for text, ns in zip(texts, found, strict=True)
        ):
            raise _NoRuleError
        return {"~numbers": [between, [self.linear(column) for column in zip(*found, strict=True)]]}


def _fit(values: list[Any], rules: _Rules, *, may_differ: bool) -> Any:
    first = values[0]
    if all(value == first for value in values):
        return first
    if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
        return {
            name: _fit([v[name] for v in values], rules, may_differ=may_differ or name in _MAY_DIFFER) for name in first
        }
    if isinstance(first, list) and all(len(value) == len(first) for value in values):
        return [_fit(list(items), rules, may_differ=may_differ) for items in zip(*values, strict=True)]
    if may_differ and isinstance(first, bool):
        return rules.zero(values)
    if may_differ and isinstance(first, int):
        return rules.linear(values)
    if may_differ and isinstance(first, str):
        return rules.numbers(values)
    raise _NoRuleError


def _maker(fitted: Any) -> Callable[[Place], Any] | None:
    """None for what is the same at all places."""
    if isinstance(fitted, dict):
        for name, make in (("~linear", _linear), ("~zero", _zero), ("~numbers", _numbers)):
            if name in fitted:
                return make(fitted[name])
        named = [(name, maker) for name, value in fitted.items() if (maker := _maker(value))]
        return (lambda place: {**fitted, **{name: maker(place) for name, maker in named}}) if named else None
    if isinstance(fitted, list):
        makers = [_maker(value) for value in fitted]
        if any(makers):
            pairs = list(zip(fitted, makers, strict=True))
            return lambda place: [maker(place) if maker else value for value, maker in pairs]
    return None


def _linear(rule: list[Any]) -> Callable[[Place], int]:
    base, slopes = rule
    if len(slopes) == 1:
        ((axis, slope),) = slopes.items()
        return lambda place: base + slope * place[axis]
    return lambda place: base + sum(slope * place[axis] for axis, slope in slopes.items())


def _zero(axes: list[str]) -> Callable[[Place], bool]:
    return lambda place: not any(place[axis] for axis in axes)


def _numbers(rule: list[Any]) -> Callable[[Place], str]:
    between, numbers = rule
    makers = [(number, _maker(number)) for number in numbers]

    def make(place: Place) -> str:
        written = [str(maker(place) if maker else number) for number, maker in makers]
        return "".join(text + number for text, number in zip(between, [*written, ""], strict=True))

    return make
