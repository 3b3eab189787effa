"""Values as they are recorded: tensors as fingerprints, what is large as a hash, the rest as JSON.

What is given is digested when it is given; on CUDA the sums stay on the device until ``Draft.values`` fetches all of them with
one copy, so that a step of training waits once. Nothing here draws a random number or holds a given tensor.

=============================  ==================================================================================
a tensor, a numpy array        ``"#<fingerprint, 32 hex digits> <dtype>[<shape>]"``, and its value if it has one element
a tensor made of tensors       an object with the digests of those: fp8 data and scales, the local part of a DTensor
bytes, and what is long        ``"#b3:<BLAKE3, 32 hex digits>"``
numbers, words, containers     JSON; tuples are lists, sets are sorted, keys are words
anything else                  ``"?<type>"``, and words that say that it is not compared
=============================  ==================================================================================
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from ckptguard.core.dtypes import BY_NAME
from ckptguard.fingerprint.live import LiveSum, collect, live_sum
from ckptguard.fingerprint.tensors import fingerprint_array
from ckptguard.resume.records import Value

LONG = 64  # parts; a list or an object with more of them is recorded as a hash
LONG_TEXT = 1024  # characters
_DEEPEST = 32
_WIDE = {"float": torch.float64, "complex": torch.complex128}
# Copies of the same elements in another order, which Transformer Engine keeps or drops as its kernels like
# (pytorch/tensor/storage/float8_tensor_storage.py, release 2.9).
_CACHES = frozenset({"data_transpose"})


def recorded(value: Any) -> Value:
    """One value as it is recorded; waits for the device."""
    draft = Draft()
    draft.add("", value)
    return draft.values()[""]


class Draft:
    """Values of one moment or of several, by name, digested when added and told together.

    Attributes:
        unobserved: What has no value that could be compared, in words.
    """

    def __init__(self) -> None:
        self.unobserved: list[str] = []
        self._trees: dict[str, Any] = {}
        self._sums: list[_Tensor] = []

    def __len__(self) -> int:
        return len(self._trees)

    def add(self, name: str, value: Any) -> None:
        """Digests a value; a later one of the same name takes its place. Raises whatever reading its parts raises."""
        with torch.no_grad():
            self._trees[name] = self._tree(value, name, 0)

    def values(self) -> dict[str, Value]:
        """All values, in the order in which their names first came; waits for the device once. The draft is empty then."""
        told = _told(self._sums)
        values = {name: _plain(tree, told) for name, tree in self._trees.items()}
        self._trees, self._sums = {}, []
        return values

    def _tree(self, value: Any, name: str, depth: int) -> Any:
        """JSON with a ``_Place`` for every tensor."""
        if value is None or isinstance(value, bool | int | float | str):
            return _scalar(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value), name)
        if isinstance(value, bytes | bytearray | memoryview):
            return _hash(value)
        if isinstance(value, io.BytesIO):
            return _hash(value.getbuffer())
        if depth > _DEEPEST:
            return self._unknown(value, name, "is nested too deep")
        if isinstance(value, Namespace):
            value = vars(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {_key(key): self._tree(part, name, depth + 1) for key, part in value.items()}
        if isinstance(value, Sequence):
            return [self._tree(part, name, depth + 1) for part in value]
        if isinstance(value, Set):
            return sorted((self._tree(part, name, depth + 1) for part in value), key=repr)
        return self._other(value, name)

    def _tensor(self, tensor: torch.Tensor, name: str) -> Any:
        try:
            if hasattr(tensor, "trigger_wait"):  # the result of a functional collective that may still be on its way
                tensor = tensor.trigger_wait()
            inner = _inner(tensor)
            if inner is not None:
                return {key: self._tensor(part, name) for key, part in inner.items()}
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                self._sums.append(_Tensor.of(tensor))
        except Exception as error:  # noqa: BLE001 - a subclass may do anything; what it is stays uncompared and is said
            return self._unknown(tensor, name, str(error).partition("\n")[0] or type(error).__name__)
        return _Place(len(self._sums) - 1)

    def _array(self, array: np.ndarray[Any, Any], name: str) -> Any:
        dtype = BY_NAME.get(array.dtype.name)
        if dtype is None:
            return (
                self._unknown(array, name, f"has elements of {array.dtype}")
                if array.dtype.hasobject
                else _hash(array.tobytes())
            )
        suffix = f" {array.item()}" if array.size == 1 else ""
        return f"#{fingerprint_array(array, dtype).hex} {dtype}{list(array.shape)}{suffix}"

    def _other(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.dtype | torch.device | PurePath | complex):
            return str(value)
        if isinstance(value, torch.Generator):
            return self._tensor(value.get_state(), name)
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        return self._unknown(value, name, "has no value that could be compared")

    def _unknown(self, value: Any, name: str, why: str) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.unobserved.append(f"{name}: a {kind} {why}" if name else f"a {kind} {why}")
        return f"?{kind}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Stands in a tree for the digest of a tensor."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    """A tensor being digested: its sums, and its value if it has one element, on CUDA a copy of it."""

    sum: LiveSum
    value: Any

    @staticmethod
    def of(tensor: torch.Tensor) -> _Tensor:
        started = live_sum(tensor)
        if tensor.numel() != 1 or BY_NAME[started.dtype].kind == "packed":
            return _Tensor(started, None)
        if tensor.device.type == "cpu":
            return _Tensor(started, tensor.item())
        wide = _WIDE.get(BY_NAME[started.dtype].kind, torch.int64)
        return _Tensor(
            started, tensor.detach().reshape(()).to(wide)
        )  # a copy: the tensor may change before it is fetched


def _told(tensors: Sequence[_Tensor]) -> list[str]:
    """The digests of tensors."""
    values = {number: item.value for number, item in enumerate(tensors)}
    for dtype in (torch.int64, *_WIDE.values()):
        waiting = [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.dtype is dtype]
        for device in {values[n].device for n in waiting}:
            here = [n for n in waiting if values[n].device == device]
            values.update(zip(here, torch.stack([values[n] for n in here]).tolist(), strict=True))
    told = []
    for number, fingerprint in enumerate(collect([item.sum for item in tensors])):
        value, kind = values[number], BY_NAME[fingerprint.dtype].kind
        if kind == "bool" and value is not None:
            value = bool(value)
        suffix = "" if value is None else f" {value}"
        told.append(f"#{fingerprint.hex} {fingerprint.dtype}{list(fingerprint.shape)}{suffix}")
    return told


def _inner(tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The tensors that one is made of; None if it holds its elements itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        return None
    if hasattr(tensor, "to_local"):
        return {"local": tensor.to_local()}
    if hasattr(tensor, "get_metadata"):  # Transformer Engine's quantised tensors
        parts = tensor.get_metadata().items()
        return {key: part for key, part in parts if isinstance(part, torch.Tensor) and key not in _CACHES}
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and hasattr(tensor, "__tensor_flatten__"):
        return {key: getattr(tensor, key) for key in tensor.__tensor_flatten__()[0]}
    if tensor.layout is torch.sparse_coo:
        return {"indices": tensor._indices(), "values": tensor._values()}
    return None


def _plain(tree: Any, told: Sequence[str]) -> Value:
    """A tree with its digests in their places; what is long is a hash of that."""
    if isinstance(tree, _Place):
        return told[tree.number]
    if isinstance(tree, dict):
        return _short({key: _plain(part, told) for key, part in tree.items()})
    if isinstance(tree, list):
        return _short([_plain(part, told) for part in tree])
    return tree


def _short(parts: Any) -> Value:
    return parts if len(parts) <= LONG else _hash(json.dumps(parts, sort_keys=True).encode())


def _scalar(value: Any) -> Value:
    if isinstance(value, str):
        return str(value) if len(value) <= LONG_TEXT else _hash(value.encode(errors="surrogatepass"))
    if value is None or isinstance(value, bool):
        return value
    return int(value) if isinstance(value, int) else float(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(key)


def _hash(data: Any) -> str:
    return f"#b3:{blake3(data).hexdigest(length=16)}"
