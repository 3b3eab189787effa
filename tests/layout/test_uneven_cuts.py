"""Units dealt out among ranks: everything once, in order, as evenly as whole units allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.core.errors import UsageError
from ckptguard.layout.uneven import Axis, Cutting, cut, deal, parse_parts, parse_replicas, place


@st.composite
def units_and_ranks(draw: st.DrawFn) -> tuple[int, int]:
    ranks = draw(st.integers(1, 64))
    return draw(st.integers(ranks, 2000)), ranks


@given(units_and_ranks())
def test_every_unit_is_dealt_out_once_and_ranks_differ_by_one(drawn: tuple[int, int]) -> None:
    units, ranks = drawn
    ranges = deal(units, ranks)
    assert [unit for begin, end in ranges for unit in range(begin, end)] == list(range(units))
    sizes = [end - begin for begin, end in ranges]
    assert len(sizes) == ranks
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] == (units % ranks > 0)


@given(units_and_ranks(), st.integers(1, 300), st.integers(1, 300))
def test_dims_of_the_same_units_are_cut_at_the_same_units(drawn: tuple[int, int], rows: int, columns: int) -> None:
    """The rows of linear_qkv and the columns of linear_proj, of other widths."""
    units, ranks = drawn
    first, second = cut(units * rows, units, ranks), cut(units * columns, units, ranks)
    assert [(begin // rows, end // rows) for begin, end in first] == list(deal(units, ranks))
    assert [(begin * columns, end * columns) for begin, end in deal(units, ranks)] == list(second)
    assert first[0][0] == 0
    assert first[-1][1] == units * rows


@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_hold_whole_copies_of_a_part(size: int, degree: int) -> None:
    places = [place(rank, size, degree) for rank in range(size)]
    held = [found for found in places if found is not None]
    assert held == [(copy, at) for copy in range(size // degree) for at in range(degree)]
    assert places == held + [None] * (size % degree)


@pytest.mark.parametrize(("units", "ranks"), [(3, 4), (0, 1), (4, 0)])
def test_no_rank_goes_without(units: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{units} units for {ranks} ranks"):
        deal(units, ranks)


def test_units_have_one_size() -> None:
    with pytest.raises(ValueError, match="10 elements are not 4 units"):
        cut(10, 4, 2)


def test_the_last_pattern_that_matches_counts() -> None:
    cutting = Cutting(Axis(6, 8), Axis(6, 8), (("*.mlp.*", 4), ("decoder.layers.1.*", 2)))
    assert cutting.part_of("decoder.layers.0.mlp.linear_fc1.weight") == 0
    assert cutting.part_of("decoder.layers.1.mlp.linear_fc1.weight") == 1
    assert cutting.part_of("output_layer.weight") is None


def test_options_are_read() -> None:
    assert parse_replicas(["1=6", "0=4"]) == ((1, 6), (0, 4))
    assert parse_parts(["decoder.layers.*.mlp.*=4"]) == (("decoder.layers.*.mlp.*", 4),)


@pytest.mark.parametrize("text", ["1", "=3", "1=", "1=0", "1=x", "x=3", "-1=3"])
def test_replicas_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--replica-tp"):
        parse_replicas([text])


def test_a_replica_has_one_degree() -> None:
    with pytest.raises(UsageError, match="replica 1 is named twice"):
        parse_replicas(["1=6", "1=4"])


@pytest.mark.parametrize("text", ["mlp", "mlp=", "=4", "mlp=0"])
def test_parts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--tp-for"):
        parse_parts([text])
