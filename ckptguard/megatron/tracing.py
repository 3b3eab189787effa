"""Tensors that record what is done to them instead of doing it. Runs in the asking process only.

Bridge's own conversion code is run on ``Traced`` tensors: views, cuts, concatenations and transposes become an
``Assembly``, which says where each element of the result comes from. What computes values is refused, but for the few
transforms below, which become sources of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckptguard.core import pieces
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.pieces import Assembly

_HANDLERS: dict[str, Callable[..., Any]] = {}


class Traced(torch.Tensor):
    """A tensor without data that knows which source elements it is made of. Casts are not recorded: the plan decides dtypes.

    Attributes:
        assembly: Where each element comes from.
    """

    assembly: Assembly

    @staticmethod
    def __new__(cls, assembly: Assembly, dtype: torch.dtype) -> Traced:  # noqa: D102
        make: Any = torch.Tensor._make_wrapper_subclass
        out: Traced = make(cls, assembly.shape, dtype=dtype, device="cpu")
        return out

    def __init__(self, assembly: Assembly, dtype: torch.dtype) -> None:
        self.assembly = assembly

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func.overloadpacket.__name__)
        if handler is None:
            raise UnsupportedError(
                f"Bridge's conversion computes values with {func}; only moves of elements can be planned"
            )
        return handler(*args, **(kwargs or {}))


def source(name: str, shape: Sequence[int], dtype: torch.dtype) -> Traced:
    """A tensor that is a source as it is."""
    return Traced(pieces.of_source(name, shape), dtype)


def _handles[Handler: Callable[..., Any]](*names: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


def _like(x: Traced, assembly: Assembly) -> Traced:
    return Traced(assembly, x.dtype)


def _lift(x: torch.Tensor) -> Assembly:
    """A plain tensor among traced ones: zeros, or values that Bridge makes up, which are refused."""
    if isinstance(x, Traced):
        return x.assembly
    if x.numel() and bool((x != 0).any()):
        raise UnsupportedError("Bridge's conversion puts values of its own into a tensor; only zeros can be planned")
    return pieces.of_source("", x.shape)


@_handles("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(x: Traced, shape: Sequence[int], *_: Any) -> Traced:
    return _like(x, pieces.reshape(x.assembly, _sizes(x, shape)))


def _sizes(x: Traced, shape: Sequence[int]) -> list[int]:
    out = [int(n) for n in shape]
    if -1 in out:
        at = out.index(-1)
        rest = 1
        for d, n in enumerate(out):
            rest *= 1 if d == at else n
        out[at] = x.numel() // rest if rest else 0
    return out


@_handles("detach", "alias", "clone", "contiguous", "lift_fresh", "_to_cpu")
def _same(x: Traced, **_: Any) -> Traced:
    return _like(x, x.assembly)


@_handles("_to_copy", "to")
def _to_copy(x: Traced, *, dtype: torch.dtype | None = None, **_: Any) -> Traced:
    return Traced(x.assembly, dtype or x.dtype)


@_handles("sub", "sub_", "add", "add_")
def _shift(x: Traced, *_: Any, **__: Any) -> Traced:
    """Bridge takes 1 off the gated norms of Qwen3-Next and adds it again on the way back; each rounds."""
    names = ", ".join(x.assembly.sources)
    raise UnsupportedError(
        f"{names}: Bridge adds to it or subtracts from it; that rounds, so not every tensor could be given back bit for bit"
    )


@_handles("permute")
def _permute(x: Traced, dims: Sequence[int]) -> Traced:
    return _like(x, pieces.permute(x.assembly, [d % x.dim() for d in dims]))


@_handles("transpose")
def _transpose(x: Traced, a: int, b: int) -> Traced:
    dims = list(range(x.dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return _like(x, pieces.permute(x.assembly, dims))


@_handles("t")
def _t(x: Traced) -> Traced:
    return _like(x, pieces.permute(x.assembly, range(x.dim())[::-1]))


@_handles("slice")
def _slice(x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Traced:
    dim %= x.dim()
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    return _like(x, pieces.narrow(x.assembly, dim, begin, max(begin, stop), step))


@_handles("narrow")
def _narrow(x: Traced, dim: int, start: int, length: int) -> Traced:
    return _slice(x, dim, start, start + length)


@_handles("select")
def _select(x: Traced, dim: int, index: int) -> Traced:
    dim, index = dim % x.dim(), index % x.shape[dim]
    one = pieces.narrow(x.assembly, dim, index, index + 1)
    return _like(x, pieces.reshape(one, [n for d, n in enumerate(one.shape) if d != dim]))


@_handles("split")
def _split(x: Traced, size: int | Sequence[int], dim: int = 0) -> list[Traced]:
    if isinstance(size, int):
        extent = x.shape[dim]
        size = [min(size, extent - at) for at in range(0, extent, size)]
    return _split_sizes(x, size, dim)


@_handles("split_with_sizes")
def _split_sizes(x: Traced, sizes: Sequence[int], dim: int = 0) -> list[Traced]:
    out, at = [], 0
    for size in sizes:
        out.append(_slice(x, dim, at, at + size))
        at += size
    return out


@_handles("unbind")
def _unbind(x: Traced, dim: int = 0) -> list[Traced]:
    return [_select(x, dim, i) for i in range(x.shape[dim])]


@_handles("unsqueeze")
def _unsqueeze(x: Traced, dim: int) -> Traced:
    shape = list(x.shape)
    shape.insert(dim % (x.dim() + 1), 1)
    return _like(x, pieces.reshape(x.assembly, shape))


@_handles("squeeze")
def _squeeze(x: Traced, dim: int | Sequence[int] | None = None) -> Traced:
    every = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % x.dim() for d in every}
    return _like(x, pieces.reshape(x.assembly, [n for d, n in enumerate(x.shape) if d not in gone or n != 1]))


@_handles("expand")
def _expand(x: Traced, shape: Sequence[int], **_: Any) -> Traced:
    more = len(shape) - x.dim()
    return _like(x, pieces.expand(x.assembly, [x.shape[d - more] if n == -1 else n for d, n in enumerate(shape)]))


@_handles("cat")
def _cat(parts: Sequence[torch.Tensor], dim: int = 0) -> Traced:
    first = next(part for part in parts if isinstance(part, Traced))
    return _like(first, pieces.concatenate([_lift(part) for part in parts], dim % first.dim()))


@_handles("stack")
def _stack(parts: Sequence[Traced], dim: int = 0) -> Traced:
    dim %= parts[0].dim() + 1
    return _cat([_unsqueeze(part, dim) for part in parts], dim)


@_handles("constant_pad_nd")
def _pad(x: Traced, pad: Sequence[int], value: float = 0) -> Traced:
    if value:
        raise UnsupportedError(f"Bridge's conversion pads with {value}; only zeros can be planned")
    out = x.assembly
    for i in range(len(pad) // 2):
        dim = x.dim() - 1 - i
        sides = []
        for n in pad[2 * i : 2 * i + 2]:
            shape = (*out.shape[:dim], n, *out.shape[dim + 1 :])
            sides.append(pieces.of_source("", shape))
        out = pieces.concatenate([sides[0], out, sides[1]], dim)
    return _like(x, out)


@_handles("index")
def _index(x: Traced, indices: Sequence[torch.Tensor | None]) -> Traced:
    chosen = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(chosen) != 1 or chosen[0][1].dim() != 1:
        raise UnsupportedError("Bridge's conversion indexes several dims at once; only one can be planned")
    return _index_select(x, *chosen[0])


@_handles("index_select")
def _index_select(x: Traced, dim: int, index: torch.Tensor) -> Traced:
    parts = [
        pieces.narrow(x.assembly, dim, begin, begin + (count - 1) * step + 1, step)
        for begin, count, step in _runs([int(i) % x.shape[dim] for i in index.tolist()])
    ]
    return _like(x, pieces.concatenate(parts, dim))


def _runs(index: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cuts indices into runs of even, growing steps: (first, count, step)."""
    at = 0
    while at < len(index):
        step = index[at + 1] - index[at] if at + 1 < len(index) else 1
        if step < 1:
            yield index[at], 1, 1
            at += 1
            continue
        count = 1
        while at + count < len(index) and index[at + count] - index[at + count - 1] == step:
            count += 1
        yield index[at], count, step
        at += count
