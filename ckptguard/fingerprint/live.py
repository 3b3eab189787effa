"""Fingerprints of live torch tensors, on whatever device they are, with the values of the CPU path.

On CUDA the sums are made by the Triton kernel and stay on the device until asked for, so that a training loop can start
many and wait once::

    sums = [live_sum(parameter) for parameter in model.parameters()]
    fingerprints = collect(sums)

torch is imported when a function is called, not with this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.fingerprint.tensors import BoxSum
from ckptguard.fingerprint.values import PRIME, Fingerprint

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 64 << 20  # largest copy that is made of a tensor that cannot be read in place


@dataclass(frozen=True, slots=True, eq=False)
class LiveSum:
    """The sums of a tensor or of a part of one, perhaps still being computed.

    Attributes:
        dtype: torch's name of the element type.
        shape: Global shape.
        sums: The sums; or, on CUDA, int64 of shape (2,) on the device.
        stream: CUDA stream that computes them, or None.
    """

    dtype: str
    shape: tuple[int, ...]
    sums: tuple[int, int] | torch.Tensor
    stream: Any = None

    def result(self) -> Fingerprint:
        """The fingerprint; waits for the device. For many, ``collect`` waits once."""
        return collect([self])[0]


def fingerprint_tensor(
    tensor: torch.Tensor, global_shape: Sequence[int] | None = None, offset: Sequence[int] | None = None
) -> Fingerprint:
    """Fingerprint of a tensor, or the part that a tensor adds to that of a global one; see ``live_sum``."""
    return live_sum(tensor, global_shape, offset).result()


def live_sum(
    tensor: torch.Tensor, global_shape: Sequence[int] | None = None, offset: Sequence[int] | None = None
) -> LiveSum:
    """Starts the sums of a tensor, on its device.

    On CUDA they are queued on the current stream, which therefore also has to do the next change of the tensor. A
    contiguous tensor on the CPU or CUDA is read in place; any other in copies of at most 64 MiB.

    Args:
        tensor: Elements: any dtype of ``core.dtypes``, any strides, any device that has data; of a DTensor, its local
            part.
        global_shape: Shape of the tensor that this is a part of; its own by default.
        offset: Where it stands in the global tensor, per dim; zero by default.

    Raises:
        TypeError: Not a plain strided tensor: a DTensor or another wrapper, or sparse, nested or quantized.
        ValueError: No known dtype, a meta tensor, or a position outside the global shape.
    """
    import torch

    if global_shape is None and offset is None and (quick := _quick(tensor)) is not None:
        return quick
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(f"{type(tensor).__name__} keeps its elements in other tensors; give those, with their offsets")
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"a tensor of layout {tensor.layout} has no fingerprint; give the dense tensors that it is made of"
        )
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = BY_NAME.get(name)
    if dtype is None:
        raise ValueError(f"elements of {name} have no fingerprint; known are {', '.join(BY_NAME)}")
    size = tuple(tensor.shape)
    if tensor.is_meta:
        raise ValueError(f"a meta tensor has no elements ({name} {list(size)})")
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise ValueError(f"the memory of the tensor was given back ({name} {list(size)})")
    shape = size if global_shape is None else tuple(global_shape)
    at = (0,) * len(shape) if offset is None else tuple(offset)
    if not len(shape) == len(at) == len(size) or not Box(at, size).within(shape):
        raise ValueError(f"a part of shape {list(size)} at {list(at)} is not inside a tensor of shape {list(shape)}")
    box = Box(at, size)
    if not box.numel:
        return LiveSum(name, shape, (0, 0))
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            return LiveSum(name, shape, _on_gpu(tensor, dtype, shape, box), torch.cuda.current_stream())
    return LiveSum(name, shape, _on_cpu(tensor, dtype, shape, box))


def _quick(tensor: torch.Tensor) -> LiveSum | None:
    """The sums of a whole plain tensor that the CPU reads in place, with weights kept from the last one of its shape.

    A model has thousands of small tensors, and preparing to sum one takes far longer than summing it.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    weights, size = _whole(tensor.dtype, tensor.shape), tensor.untyped_storage().nbytes()
    if weights is None or size < (tensor.storage_offset() + weights.box.numel) * weights.dtype.itemsize:
        return None
    sums = weights.at(tensor.data_ptr())
    return None if sums is None else LiveSum(weights.dtype.name, weights.shape, sums)


@lru_cache(maxsize=256)
def _whole(dtype: torch.dtype, shape: torch.Size) -> BoxSum | None:
    """Weights of a whole tensor; None if it has no elements, or of a type that is not known."""
    known = BY_NAME.get(str(dtype).removeprefix("torch."))
    size = tuple(shape)
    return None if known is None or not prod(size) else BoxSum(known, size, whole(size))


def collect(sums: Sequence[LiveSum]) -> list[Fingerprint]:
    """Waits for sums and fetches them, with one copy per device; in the order given."""
    fetched: dict[int, tuple[int, int]] = {}
    waiting: dict[torch.device, list[int]] = {}
    for number, item in enumerate(sums):
        if isinstance(item.sums, tuple):
            fetched[number] = item.sums
        else:
            waiting.setdefault(item.sums.device, []).append(number)
    for numbers in waiting.values():
        values = _fetch([sums[number] for number in numbers])
        fetched.update(zip(numbers, values, strict=True))
    return [Fingerprint(item.dtype, item.shape, fetched[number]) for number, item in enumerate(sums)]


def _fetch(sums: Sequence[LiveSum]) -> list[tuple[int, int]]:
    """The values of sums on one device."""
    import torch

    tensors = [item.sums for item in sums if isinstance(item.sums, torch.Tensor)]
    for stream in {item.stream for item in sums if item.stream is not None}:
        torch.cuda.current_stream(tensors[0].device).wait_stream(stream)
    return [(int(a), int(b)) for a, b in torch.stack(tensors).cpu().tolist()]


def _on_cpu(tensor: torch.Tensor, dtype: DType, shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Sums of a tensor that the CPU reads: in place where it is contiguous on the CPU, else copied slab by slab."""
    import torch

    weights = BoxSum(dtype, shape, box)
    sums = [0, 0]
    for begin, _, part in _readable(tensor, dtype, in_place=tensor.device.type == "cpu"):
        data = part.cpu().view(torch.uint8).numpy()
        for lane, value in enumerate(weights.of(data, begin)):
            sums[lane] = (sums[lane] + value) % PRIME
    return sums[0], sums[1]


def _on_gpu(tensor: torch.Tensor, dtype: DType, shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """Sums of a tensor by the Triton kernel, int64 (2,) on its device; nothing waits for them."""
    import torch

    from ckptguard.fingerprint import triton_kernel

    word = torch.uint8 if dtype.word_bytes == 1 else torch.uint16
    partials = []
    for _, inside, part in _readable(tensor, dtype, in_place=True):
        words = part.view(word)
        placed = Box(tuple(a + b for a, b in zip(box.offset, inside.offset, strict=True)), inside.size)
        partials.append(triton_kernel.partial_sums(words, dtype, shape, placed))
    return triton_kernel.reduce(torch.cat(partials, dim=1) if len(partials) > 1 else partials[0])


def _readable(tensor: torch.Tensor, dtype: DType, in_place: bool) -> Iterator[tuple[int, Box, torch.Tensor]]:
    """Yields the parts of a tensor as flat contiguous tensors of plain bits: (first element, box, elements).

    The bits are viewed as integers, because copying some packed types is not implemented, and a copy of integers keeps
    NaN payloads for certain. Conjugates and negatives that torch has put off are carried out first.
    """
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[dtype.itemsize]
    if in_place and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        yield 0, Box((0,) * tensor.dim(), tuple(tensor.shape)), _flat(tensor.view(bits))
        return
    for begin, box in slabs(tuple(tensor.shape), max(1, SLAB_BYTES // dtype.itemsize)):
        part = tensor
        for dim, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
            part = part.narrow(dim, start, length)
        yield begin, box, _flat(part.resolve_conj().resolve_neg().view(bits).contiguous())


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor in one dim of stride 1. ``reshape`` keeps the odd stride that a dim of extent 1 may have."""
    return tensor.as_strided((tensor.numel(),), (1,))


def slabs(size: Sequence[int], limit: int) -> Iterator[tuple[int, Box]]:
    """Cuts a box into boxes of at most ``limit`` elements that are row-major runs of it.

    Args:
        size: Extents of the box.
        limit: At least the extent of the smallest step that ``BoxSum.of`` takes, 64 elements.

    Yields:
        Number of the first element, counted row-major, and the part; in order.
    """
    cut = 0  # the dim that is cut: all of the later ones fit
    while cut < len(size) and prod(size[cut + 1 :]) > limit:
        cut += 1
    if cut >= len(size):
        yield 0, Box((0,) * len(size), tuple(size))
        return
    row = prod(size[cut + 1 :])
    rows = max(1, limit // max(row, 1))
    for outer in range(prod(size[:cut])):
        lead, rest = [], outer
        for extent in reversed(size[:cut]):
            rest, at = divmod(rest, extent)
            lead.append(at)
        for start in range(0, size[cut], rows):
            count = min(rows, size[cut] - start)
            offset = (*reversed(lead), start, *(0 for _ in size[cut + 1 :]))
            yield (outer * size[cut] + start) * row, Box(offset, (*(1 for _ in lead), count, *size[cut + 1 :]))
