"""Reading pickles without running anything: an unpickler that knows a list of names and makes inert records of them.

What a format needs to know by name (torch's metadata classes, ``Namespace``, tensors) becomes a small record of our own;
classes of the Megatron and Bridge packages that appear in training arguments become ``Opaque`` values that hold their state
and do nothing. Any other name is refused before anything of it is imported. torch itself is never imported.

Source of the names: torch/distributed/checkpoint/{metadata,filesystem,planner}.py, torch/_utils.py, torch/serialization.py
(2.14.1) and megatron/core/safe_globals.py (0.19.2).
"""

from __future__ import annotations

import io
import pickle
import resource
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptguard.core.dtypes import BY_NAME, BY_STORAGE_CLASS, DType
from ckptguard.core.errors import DamagedError, UnsafePickleError
from ckptguard.core.problems import Problem

# The index of a million chunks unpickles to about 2 GiB; threads that start meanwhile reserve 0.1 GiB each.
_FENCE_BYTES = 6 << 30


class Record:
    """A pickled instance of a known class: its attributes, and none of its behaviour."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        if args:
            self.__dict__["args"] = args
        self.__dict__.update(kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class PropertiesRecord(Record):
    """torch's TensorProperties, whose pickled state is the tuple (dtype, layout, requires_grad, memory_format, pin_memory)."""

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) else state.get("dtype")


class Opaque(Record):
    """An instance, an enum member or a function of a package that is known and never imported."""

    origin = ""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Dict subclasses store their items this way."""
        self.__dict__.setdefault("items", {})[key] = value

    def append(self, value: object) -> None:
        """List subclasses store their items this way."""
        self.__dict__.setdefault("values", []).append(value)

    def extend(self, values: list[object]) -> None:
        """As append, in bulk."""
        self.__dict__.setdefault("values", []).extend(values)

    def plain(self) -> object:
        """The value of an enum member, else the origin with the attributes; for display."""
        args: Any = getattr(self, "args", ())
        if len(args) == 1 and len(vars(self)) == 1 and isinstance(args[0], int | str):
            return f"{self.origin.rsplit('.', 1)[-1]}({args[0]})"
        return {"class": self.origin, **vars(self)} if vars(self) else self.origin


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A torch storage inside a zip: which record holds it, and how many elements of which type it has."""

    key: str
    dtype: DType | None
    numel: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A pickled tensor: where its elements stand, nothing read. Strides and offset are in elements."""

    storage: StorageRef
    dtype: DType
    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild_tensor(storage: StorageRef, offset: int, size: Any, stride: Any, *rest: object) -> TensorRef:
    dtype = storage.dtype or next((x for x in rest if isinstance(x, DType)), None)
    if dtype is None:
        raise ValueError("a tensor without a dtype")
    return TensorRef(storage, dtype, int(offset), tuple(size), tuple(stride))


def _rebuild_tensor_v3(storage: StorageRef, offset: int, size: Any, stride: Any, *rest: object) -> TensorRef:
    # (requires_grad, backward_hooks, dtype, metadata): the storage is untyped, the dtype stands apart
    dtype = next(x for x in rest if isinstance(x, DType))
    return TensorRef(storage, dtype, int(offset), tuple(size), tuple(stride))


def _first(value: object, *_: object) -> object:
    return value


def _bounded_bytes(*args: object) -> bytes:
    """Stands for ``_codecs.encode`` and bytearray: old protocols spell byte strings with them."""
    value = args[0] if args else b""
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, list):
        return bytes(value)
    raise ValueError(f"a byte string made from {type(value).__name__}")


def _inert(*args: object, **kwargs: object) -> Opaque:
    return Opaque(*args, **kwargs)


def _set(values: Any = ()) -> set[Any]:
    return set(values)


class _Call:
    """A function handed to the unpickler. Immutable, so that a pickle's BUILD cannot set attributes of ours."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("stand-ins take no attributes")


def _path(*parts: object) -> str:
    return "/".join(str(part) for part in parts).replace("//", "/")


def _bytes_io(value: bytes = b"", *_: object) -> bytes:
    return bytes(value)


def _from_type(function: Callable[..., Any], _type: object, args: Any, _state: object) -> Any:
    return function(*args)


def _reconstructor(cls: Callable[[], Any], *_: object) -> Any:
    return cls()


def _frozenset(values: Any = ()) -> frozenset[Any]:
    return frozenset(values)


def _counter(values: Any = ()) -> Counter[Any]:
    return Counter(values)


def _defaultdict(*_: object) -> dict[Any, Any]:
    return {}


_RECORDS = {
    f"torch.distributed.checkpoint.{module}.{name}"
    for module, names in {
        "metadata": (
            "Metadata ChunkStorageMetadata TensorStorageMetadata BytesStorageMetadata TensorProperties MetadataIndex "
            "StorageMeta _MEM_FORMAT_ENCODING"
        ),
        "filesystem": "_StorageInfo _StoragePrefix",
        "planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData LoadItemType",
    }.items()
    for name in names.split()
} | {
    "argparse.Namespace",
    "types.SimpleNamespace",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
}
_NAMED: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch.nn.parameter.Parameter": _first,
    "torch.Tensor": _first,  # the type of a tensor with attributes of its own, such as a copy of a parallel parameter
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _defaultdict,
    "collections.deque": deque,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.complex": complex,
    "builtins.slice": slice,
    "builtins.bytearray": _bounded_bytes,
    "builtins.object": _inert,
    "_codecs.encode": _bounded_bytes,
    "copyreg._reconstructor": _reconstructor,
    "io.BytesIO": _bytes_io,
    "pathlib.PosixPath": _path,
    "pathlib.Path": _path,
}
_INERT = (
    "torch.device torch.serialization._get_layout datetime.timedelta datetime.datetime signal.Signals functools.partial "
    "numpy.ndarray numpy.dtype numpy.dtypes.UInt32DType numpy._core.multiarray._reconstruct numpy._core.multiarray.scalar "
    "numpy._core.numeric._frombuffer"
)
_CALLABLES = {**_NAMED, **dict.fromkeys(_INERT.split(" "), _inert)}
# Old and new spellings of the same module.
_SPELLINGS = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "_io": "io",
    "pathlib._local": "pathlib",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
}
# Training arguments hold enums, configs and functions of these packages. They are kept as names, never imported.
_OPAQUE_PACKAGES = (
    "megatron",
    "transformer_engine",
    "nemo",
    "modelopt",
    "torch.nn.functional",
    "torch.nn.init",
    "torch._C._nn",
    "torch.nn.modules.activation",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed.device_mesh",
)
_OPAQUE_FUNCTIONS = {f"torch.{name}" for name in ("gelu", "relu", "sigmoid", "tanh", "silu", "strided", "sparse_coo")}


class _Unpickler(pickle.Unpickler):
    """find_class hands out inert stand-ins only; the C machinery does the rest at full speed."""

    def __init__(self, stream: io.BytesIO, made: dict[str, Any]) -> None:
        super().__init__(stream, encoding="latin-1")
        self._made = made

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        known = self._made.get(full)
        if known is None:
            known = self._made[full] = _stand_in(full, module, name)
        return known

    def persistent_load(self, pid: Any) -> StorageRef:
        # ("storage", class, key, location, numel): torch/serialization.py
        kind, cls, key, _, numel = pid
        if kind != "storage":
            raise ValueError(f"a persistent id of kind {kind!r}, expected 'storage'")
        return StorageRef(str(key), cls.dtype if isinstance(cls, _StorageClass) else None, int(numel))


@dataclass(frozen=True, slots=True)
class _StorageClass:
    dtype: DType | None


def _stand_in(full: str, module: str, name: str) -> Any:
    if full in _RECORDS:
        return type(name, (PropertiesRecord if name == "TensorProperties" else Record,), {})
    if full == "torch.Size":
        return tuple  # itself, not through a _Call: an index holds hundreds of thousands
    common = f"{_SPELLINGS.get(module, module)}.{name}"
    if common in _CALLABLES:
        return _Call(_CALLABLES[common])
    if module == "torch" and name in BY_NAME:
        return BY_NAME[name]
    if name in BY_STORAGE_CLASS and module in ("torch", "torch.storage"):
        return _StorageClass(BY_STORAGE_CLASS[name])
    if full in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
        return _StorageClass(None)
    if full in _OPAQUE_FUNCTIONS or any(module == p or module.startswith(f"{p}.") for p in _OPAQUE_PACKAGES):
        return type(name, (Opaque,), {"origin": full})
    raise _RefusedError(full)


class _RefusedError(Exception):
    """Carries the refused name out of the C unpickler."""


class _Fence:
    """Turns an allocation far beyond the input's size into a MemoryError instead of an out-of-memory kill.

    A pickle of a few bytes can ask for gigabytes (a huge length, a huge memo index). Inside the block the address space of
    the process may grow by ``_FENCE_BYTES`` at most. The limit is the process's: threads inside at once share one fence, and
    the last to leave takes it down. Whoever reads many pickles enters it once around all of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            self._before = resource.getrlimit(resource.RLIMIT_AS)
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            soft, hard = self._before
            limit = now + _FENCE_BYTES
            resource.setrlimit(
                resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard)
            )

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                resource.setrlimit(resource.RLIMIT_AS, self._before)


FENCE = _Fence()


def load(data: bytes, *, where: str, file: str | None = None, tensor: str | None = None) -> Any:
    """Unpickles inertly.

    Args:
        data: The pickle.
        where: What is read, for messages; usually the file's path.
        file: Relative path for the problem record.
        tensor: Tensor or object concerned, for the problem record.

    Returns:
        Plain values, ``Record``, ``Opaque`` and ``TensorRef``.

    Raises:
        UnsafePickleError: It names something outside the allow-list.
        DamagedError: It is not a complete pickle, or asks for far more memory than its size explains.
    """
    try:
        with FENCE:
            return _Unpickler(io.BytesIO(data), {}).load()
    except _RefusedError as error:
        message = f"{where}: its pickle names {error}, which no checkpoint needs; nothing was run"
        raise UnsafePickleError(
            message,
            problems=[Problem("unsafe-pickle", message, file=file, tensor=tensor)],
            next_step="Do not load this file with torch or Megatron. Ask where it came from.",
        ) from None
    except MemoryError:
        message = f"{where}: its pickle of {len(data)} bytes asks for an absurd amount of memory"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=file, tensor=tensor)]) from None
    except RecursionError:
        message = f"{where}: its pickle is nested too deeply to be real"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=file, tensor=tensor)]) from None
    except _BROKEN as error:
        message = f"{where}: not a whole pickle ({type(error).__name__}: {error})"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=file, tensor=tensor)]) from error


# What the C unpickler and the stand-ins raise on bytes that are not a sound pickle.
_BROKEN = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError,
    OverflowError, StopIteration, UnicodeDecodeError, AssertionError,
)  # fmt: skip


def as_plain(value: object) -> object:
    """Turns a loaded value into dicts, lists and scalars, for facts and JSON; tensors become their dtype and shape.

    Values nested beyond 12 levels, and all after the first million, become "...": a pickle can share one list a thousand
    times at each of many levels.
    """
    return _plain(value, 12, [1_000_000])


def _plain(value: object, levels: int, left: list[int]) -> object:
    left[0] -= 1
    if levels == 0 or left[0] < 0:
        return "..."

    def inner(item: object) -> object:
        return _plain(item, levels - 1, left)

    if isinstance(value, dict):
        return {str(k): inner(v) for k, v in value.items()}
    if isinstance(value, list | tuple | deque | set | frozenset):
        return [inner(v) for v in value]
    if isinstance(value, TensorRef):
        return f"tensor({value.dtype}, {list(value.size)})"
    if isinstance(value, Opaque):
        return inner(value.plain())
    if isinstance(value, Record):
        return {k: inner(v) for k, v in vars(value).items()}
    if isinstance(value, DType):
        return value.name
    if isinstance(value, type) and issubclass(value, Opaque):
        return value.origin
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value if isinstance(value, str | int | float | bool | None) else str(type(value).__name__)
