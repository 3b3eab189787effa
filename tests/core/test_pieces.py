"""Assemblies against numpy: every operation, and the way back."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptguard.core import pieces
from ckptguard.core.boxes import Box, whole
from ckptguard.core.pieces import Assembly


def realise(assembly, values):
    """The tensor that an assembly stands for, from flat source arrays."""
    out = np.full(assembly.shape, -1, np.int64)
    for p in assembly.pieces:
        index = np.ix_(*(o + np.arange(n) * s for o, n, s in zip(p.offset, p.size, p.step, strict=True)))
        from_ = p.first + sum(
            (np.arange(n) * s).reshape([-1 if d == i else 1 for i in range(len(p.size))])
            for d, (n, s) in enumerate(zip(p.size, p.strides, strict=True))
        )
        assert (out[index] == -1).all(), "an element is in two pieces"
        out[index] = np.broadcast_to(values[p.source][from_] if p.source else 0, p.size)
    assert (out >= 0).all(), "an element is in no piece"
    return out


def factors(draw, number):
    out = []
    while number > 1 and len(out) < 4:
        factor = draw(st.sampled_from([n for n in range(1, number + 1) if number % n == 0]))
        out.append(factor)
        number //= factor
    return [*out, number]


@st.composite
def programs(draw):
    """A few random tensor operations, done on arrays and on assemblies alike."""
    shapes = {name: tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))) for name in ("a", "b")}
    flat, at = {}, 1
    for name, shape in shapes.items():
        flat[name] = np.arange(at, at + prod(shape))
        at += prod(shape)
    array, assembly = flat["a"].reshape(shapes["a"]), pieces.of_source("a", shapes["a"])
    for _ in range(draw(st.integers(0, 6))):
        array, assembly = step(draw, array, assembly, flat["b"], shapes["b"])
    return array, assembly, flat, shapes


def step(draw, array, assembly, other, other_shape):
    kind = draw(st.sampled_from(["permute", "reshape", "narrow", "cat", "twice", "zeros", "expand"]))
    dim = draw(st.integers(0, array.ndim - 1)) if array.ndim else 0
    if kind == "permute":
        dims = draw(st.permutations(range(array.ndim)))
        return array.transpose(dims), pieces.permute(assembly, dims)
    if kind == "reshape":
        shape = factors(draw, array.size)
        return array.reshape(shape), pieces.reshape(assembly, shape)
    if kind == "narrow" and array.ndim:
        begin = draw(st.integers(0, array.shape[dim] - 1))
        end, jump = draw(st.integers(begin + 1, array.shape[dim])), draw(st.integers(1, 3))
        cut = tuple(slice(begin, end, jump) if d == dim else slice(None) for d in range(array.ndim))
        return array[cut], pieces.narrow(assembly, dim, begin, end, jump)
    if kind == "cat" and array.ndim == 1:
        more = pieces.reshape(pieces.of_source("b", other_shape), [other.size])
        return np.concatenate([array, other]), pieces.concatenate([assembly, more], 0)
    if kind == "zeros" and array.ndim:
        return np.concatenate([array, np.zeros_like(array)], dim), pieces.concatenate(
            [assembly, pieces.of_source("", array.shape)], dim
        )
    if kind == "expand" and array.size < 60:
        shape = (2, *array.shape)
        return np.broadcast_to(array, shape), pieces.expand(assembly, shape)
    if kind == "twice" and array.ndim and array.size < 60:
        turned = pieces.permute(assembly, range(array.ndim))
        return np.concatenate([array, array], dim), pieces.concatenate([assembly, turned], dim)
    return array, assembly


@given(programs())
def test_operations_do_what_they_do_to_arrays(program):
    array, assembly, flat, _ = program
    assert assembly.shape == array.shape
    np.testing.assert_array_equal(realise(assembly, flat), array)


@given(programs())
def test_the_way_back_gives_every_used_element(program):
    array, assembly, flat, shapes = program
    back = pieces.invert({"t": assembly}, shapes)
    used = set(array.reshape(-1).tolist())
    target = array.reshape(-1)
    for name, shape in shapes.items():
        found = np.zeros(shape, np.int64)
        for p in back[name]:
            index = np.ix_(*(o + np.arange(n) * s for o, n, s in zip(p.offset, p.size, p.step, strict=True)))
            from_ = p.first + sum(
                (np.arange(n) * s).reshape([-1 if d == i else 1 for i in range(len(p.size))])
                for d, (n, s) in enumerate(zip(p.size, p.strides, strict=True))
            )
            found[index] = target[from_]
        own = flat[name].reshape(shape)
        np.testing.assert_array_equal(found, np.where(np.isin(own, list(used)), own, 0))


@given(programs(), st.data())
def test_a_piece_within_a_box(program, data):
    array, assembly, flat, _ = program
    begin = [data.draw(st.integers(0, n - 1)) for n in array.shape]
    size = [data.draw(st.integers(1, n - b)) for n, b in zip(array.shape, begin, strict=True)]
    box = Box(tuple(begin), tuple(size))
    inside = [part for p in assembly.pieces if (part := p.within(box))]
    moved = [pieces.replace(p, offset=tuple(o - b for o, b in zip(p.offset, box.offset, strict=True))) for p in inside]
    got = realise(Assembly(box.size, tuple(moved)), flat)
    cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
    np.testing.assert_array_equal(got, array[cut])
    assert all(p.within(whole(array.shape)) == p for p in assembly.pieces)


def test_qkv_interleaving_stays_small():
    groups, per_group, head, hidden = 8, 4, 16, 128
    q = pieces.of_source("q", (groups * per_group * head, hidden))
    k, v = (pieces.of_source(name, (groups * head, hidden)) for name in "kv")
    parts = [pieces.reshape(x, (groups, -1 % (x.shape[0] // groups) + 1, hidden)) for x in (q, k, v)]
    fused = pieces.reshape(pieces.concatenate(parts, 1), (groups * (per_group + 2) * head, hidden))
    assert len(fused.pieces) == 3 * groups
    assert fused.sources == ("q", "k", "v")


def test_a_transpose_is_one_piece_both_ways():
    turned = pieces.permute(pieces.of_source("w", (300, 200)), (1, 0))
    assert len(turned.pieces) == 1
    (back,) = pieces.invert({"t": turned}, {"w": (300, 200)})["w"]
    assert back.size == (300, 200)
    assert back.strides == (1, 300)


def test_a_wrong_reshape_is_refused():
    with pytest.raises(ValueError, match="cannot be reshaped"):
        pieces.reshape(pieces.of_source("w", (3, 2)), (4, 2))
