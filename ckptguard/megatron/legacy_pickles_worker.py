"""Makes the pickles of legacy files as torch.save makes them, with stand-ins for tensors whose elements come later.

``python -m ckptguard.megatron.legacy_pickles_worker``, JSON on both ends: training arguments hold objects of Megatron's
classes, which nothing else here imports. Source: torch/serialization.py ``_save`` and torch/_tensor.py
``_reduce_ex_internal`` (2.14.1) for the pickles; for the content see ``legacy_pickles``.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ckptguard.core.dtypes import BY_NAME, BY_STORAGE_CLASS
from ckptguard.megatron import process, safe_loading
from ckptguard.megatron.legacy_pickles import OPTIMIZER_STATES

_PROTOCOL = 2  # torch/serialization.py DEFAULT_PROTOCOL
_STORAGE_CLASS = {dtype.name: getattr(torch, name) for name, dtype in BY_STORAGE_CLASS.items()}
_KEPT = ("args", "checkpoint_version", "iteration", "opt_param_scheduler", "num_floating_point_operations_so_far")


class NoGroupsError(ValueError):
    """The common state lacks what an optimizer needs beside the state of its parameters."""


def main() -> None:
    """Answers one question."""
    process.serve(_answer, safe_loading.register)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        common = _loaded(question["common"], "the common state")
        own = {path: {"rng_state": _loaded(data, "an RNG state")} for path, data in question["rng_states"].items()}
    except safe_loading.UnreadableError as error:
        return {"damaged": str(error)}
    try:
        return {"files": rank_pickles(question["files"], common, own)}
    except NoGroupsError as error:
        return {"unsupported": str(error)}


def _loaded(text: str, where: str) -> Any:
    """A value that torch.save wrote; as an object of ``torch_dist`` it stands in a list."""
    value = safe_loading.load(io.BytesIO(base64.b64decode(text)), where=where)
    return value[0] if isinstance(value, list) else value


def rank_pickles(
    files: Sequence[Mapping[str, Any]],
    common: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The pickle of every file; the plain form of ``legacy_pickles.Pickled``.

    Args:
        files: As ``legacy_pickles.to_plain`` gives them.
        common: What all ranks store alike, in the form of a ``torch_dist`` checkpoint's common state or of a legacy file:
            ``args`` (a Namespace), ``iteration``, ``checkpoint_version``, ``opt_param_scheduler``, ``optimizer`` with its
            ``param_groups``, ``num_floating_point_operations_so_far``. What legacy files do not have of it
            (``content_metadata``, ``rerun_state_machine``) is left out.
        own: Further entries by path of the file, such as ``{"rng_state": [...]}``: any values, tensors among them.

    Raises:
        NoGroupsError: Optimizer state is to be stored, and the common state has no parameter groups.
    """
    out = []
    for file in files:
        if file["kind"] == "OptimizerFile":
            value: Any = _optimizer_value(file["optimizers"])
        else:
            value = _model_value(file, common) | dict((own or {}).get(file["path"], {}))
        data, storages = pickled(value)
        texts = [s if isinstance(s, int) else base64.b64encode(s).decode() for s in storages]
        out.append({"pickle": base64.b64encode(data).decode(), "storages": texts})
    return out


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A contiguous tensor that needs no gradient and whose elements come later.

    Attributes:
        number: Which tensor of the file it is.
        dtype: torch's name.
        shape: Of the tensor.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """As a tensor's: a function of torch's, and its arguments with the storage first."""
        hooks: OrderedDict[str, Any] = OrderedDict()
        args = (_Storage(self), 0, self.shape, _strides(self.shape), False, hooks)
        if self.dtype in _STORAGE_CLASS:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, getattr(torch, self.dtype))


class _Storage:
    """The storage of a placeholder."""

    def __init__(self, of: Placeholder) -> None:
        self.of = of


class _Pickler(pickle.Pickler):
    """Gives storages the persistent ids that torch.save gives them, and remembers which is which."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, _PROTOCOL)
        self.storages: list[bytes | int] = []
        self._keys: dict[int, str] = {}
        self._kept: list[Any] = []  # so that no address is used twice

    def persistent_id(self, obj: Any) -> Any:
        """A storage's id: its class, key, location and length."""
        if isinstance(obj, _Storage):
            of = obj.of
            typed = _STORAGE_CLASS.get(of.dtype)
            numel = prod(of.shape) * (1 if typed else BY_NAME[of.dtype].itemsize)
            return "storage", typed or torch.UntypedStorage, self._new(of.number), "cpu", numel
        if isinstance(obj, torch.storage.TypedStorage):
            storage: Any = obj
            typed = getattr(torch, storage._pickle_storage_type())
            return "storage", typed, self._key(storage._untyped_storage), "cpu", storage._size()
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, self._key(obj), "cpu", obj.nbytes()
        return None

    def _key(self, storage: Any) -> str:
        if storage._cdata not in self._keys:
            self._kept.append(storage)
            whole = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
            self._keys[storage._cdata] = self._new(whole.numpy().tobytes())
        return self._keys[storage._cdata]

    def _new(self, content: bytes | int) -> str:
        self.storages.append(content)
        return str(len(self.storages) - 1)


def pickled(value: Any) -> tuple[bytes, list[bytes | int]]:
    """The pickle that torch.save makes of a value, placeholders taken for tensors.

    Args:
        value: Of whatever can be pickled; each placeholder stands in it once.

    Returns:
        The pickle, and by key each storage's bytes or the number of its placeholder.
    """
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(value)
    return out.getvalue(), pickler.storages


def _model_value(file: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """``generate_state_dict``, in its order; on the place of each tensor a placeholder."""
    value = {name: common[name] for name in ("args", "checkpoint_version", "iteration") if name in common}
    number = 0
    for i, chunk in enumerate(file["chunks"]):
        state: OrderedDict[str, Any] = OrderedDict()
        for item in chunk:
            if "empty_tensor" in item:
                state[item["name"]] = torch.empty(0, dtype=torch.uint8) if item["empty_tensor"] else None
            else:
                state[item["name"]] = Placeholder(number, item["dtype"], tuple(item["shape"]))
                number += 1
        value[f"model{i}" if len(file["chunks"]) > 1 else "model"] = state
    if file["optimizer"]:
        value["optimizer"] = _optimizer_common(common.get("optimizer"))
    return value | {name: common[name] for name in _KEPT if name in common and name not in value}


def _optimizer_common(stored: Any) -> Any:
    """``DistributedOptimizer.state_dict`` of each optimizer, a list of them where there are several.

    A ``torch_dist`` common state numbers several by the keys 0, 1, ... and also says how the parameters' state was sharded.
    """
    if isinstance(stored, Mapping) and stored and all(isinstance(key, int) for key in stored):
        stored = [stored[key] for key in sorted(stored)]
    if isinstance(stored, Sequence):
        return [_optimizer_common(one) for one in stored]
    groups = stored.get("optimizer", {}).get("param_groups") if isinstance(stored, Mapping) else None
    if not groups:
        raise NoGroupsError("the common state has no parameter groups of the optimizer")
    kept = {key: item for key, item in stored.items() if not key.startswith("param_state")}
    plain = [{key: item for key, item in group.items() if key != "params"} for group in groups]
    return {**kept, "optimizer": {**stored["optimizer"], "param_groups": plain}}


def _optimizer_value(optimizers: Sequence[Any]) -> Any:
    """``get_parameter_state_dp_zero`` of each optimizer, a list of them where there are several."""
    values: list[Any] = []
    number = 0
    for buffers in optimizers:
        if buffers is None:
            values.append(None)
            continue
        value: dict[Any, Any] = {"buckets_coalesced": True}
        for i, buffer in enumerate(buffers):
            state: dict[str, Any] = {}
            for name in OPTIMIZER_STATES:
                state[name] = Placeholder(number, "float32", (buffer["numel"],))
                number += 1
            dtypes = tuple(getattr(torch, name) for name in buffer["dtypes"])
            value[i] = {dtypes: {**state, "numel_unpadded": buffer["numel"]}}
        values.append(value)
    return values if len(values) > 1 else values[0]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major, as torch gives them to a contiguous tensor: a zero size counts as one."""
    out, step = [], 1
    for extent in reversed(shape):
        out.append(step)
        step *= max(extent, 1)
    return tuple(reversed(out))


if __name__ == "__main__":
    main()
