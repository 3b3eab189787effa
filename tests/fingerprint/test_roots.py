"""The root over a set of fingerprints."""

from __future__ import annotations

import pytest
import slow_reference
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.core.dtypes import BY_NAME
from ckptguard.fingerprint.roots import line, root
from ckptguard.fingerprint.values import PRIME, Fingerprint

names = st.text(st.characters(codec="utf-8") | st.sampled_from("\t\n\\tn/."), max_size=8)
sums = st.integers(0, PRIME - 1)
fingerprints = st.builds(
    Fingerprint,
    st.sampled_from(list(BY_NAME)),
    st.lists(st.integers(0, 1 << 40), max_size=3).map(tuple),
    st.tuples(sums, sums),
)
sets = st.dictionaries(names, fingerprints, max_size=6)

ONE = Fingerprint("float32", (2, 3), (1, 2))


@given(sets)
def test_root_is_that_of_the_slow_reference(some: dict[str, Fingerprint]) -> None:
    entries = [(name, value.dtype, value.shape, value.hex) for name, value in some.items()]
    assert root(some) == slow_reference.root(entries)


@given(sets)
def test_order_does_not_matter(some: dict[str, Fingerprint]) -> None:
    assert root(dict(reversed(some.items()))) == root(some)


@given(sets, sets)
def test_different_sets_have_different_roots(a: dict[str, Fingerprint], b: dict[str, Fingerprint]) -> None:
    assert (root(a) == root(b)) == (a == b)


@given(sets)
def test_lines_can_be_taken_apart_again(some: dict[str, Fingerprint]) -> None:
    text = b"".join(line(name, value) for name, value in some.items()).decode()
    lines = text.split("\n")[:-1]
    assert len(lines) == len(some)
    for (name, value), written in zip(some.items(), lines, strict=True):
        escaped, dtype, shape, digits = written.split("\t")
        raw = escaped.replace("\\\\", "\0").replace("\\t", "\t").replace("\\n", "\n").replace("\0", "\\")
        assert "\0" in name or raw == name
        assert (dtype, digits) == (value.dtype, value.hex)
        assert tuple(int(extent) for extent in shape.split(",") if extent) == value.shape


@pytest.mark.parametrize(
    "other",
    [
        {"a": Fingerprint("float32", (3, 2), (1, 2))},
        {"a": Fingerprint("int32", (2, 3), (1, 2))},
        {"a": Fingerprint("float32", (2, 3), (2, 1))},
        {"b": ONE},
        {"a": ONE, "b": ONE},
        {"a\tfloat32\t2,3": ONE},
        {},
    ],
)
def test_everything_counts(other: dict[str, Fingerprint]) -> None:
    assert root(other) != root({"a": ONE})


def test_names_are_sorted_by_their_bytes_before_escaping() -> None:
    # A tab sorts before a blank, its escaped form after it; U+FFFF sorts before U+10000 in UTF-8 but not in UTF-16.
    some = {"a b": ONE, "a\tb": ONE, "\U00010000": ONE, "\uffff": ONE}
    assert root(some) == slow_reference.root([(name, "float32", (2, 3), ONE.hex) for name in some])


def test_a_name_without_utf8_form_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        root({"\ud800": ONE})
