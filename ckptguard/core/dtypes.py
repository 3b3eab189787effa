"""Element types by their torch name, with the facts that reading and fingerprinting need. No torch import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ValueKind = Literal["float", "int", "uint", "bool", "complex", "packed"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: torch's name without the module, such as ``bfloat16``.
        itemsize: Bytes per element. ``float4_e2m1fn_x2`` packs two values in one element of one byte.
        kind: How its bits mean a value.
        safetensors: The safetensors code, or "" where that format has none.
    """

    name: str
    itemsize: int
    kind: ValueKind
    safetensors: str = ""

    @property
    def word_bytes(self) -> int:
        """Bytes of one fingerprint word: 1 for one-byte elements, else 2."""
        return 1 if self.itemsize == 1 else 2

    @property
    def words(self) -> int:
        """Fingerprint words per element."""
        return self.itemsize // self.word_bytes

    def __str__(self) -> str:
        return self.name


_ALL = (
    DType("float64", 8, "float", "F64"),
    DType("float32", 4, "float", "F32"),
    DType("float16", 2, "float", "F16"),
    DType("bfloat16", 2, "float", "BF16"),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3"),
    DType("float8_e5m2", 1, "float", "F8_E5M2"),
    DType("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, "float", "F8_E8M0"),
    DType("float4_e2m1fn_x2", 1, "packed", "F4"),
    DType("int64", 8, "int", "I64"),
    DType("int32", 4, "int", "I32"),
    DType("int16", 2, "int", "I16"),
    DType("int8", 1, "int", "I8"),
    DType("uint64", 8, "uint", "U64"),
    DType("uint32", 4, "uint", "U32"),
    DType("uint16", 2, "uint", "U16"),
    DType("uint8", 1, "uint", "U8"),
    DType("bool", 1, "bool", "BOOL"),
    DType("complex64", 8, "complex", "C64"),
    DType("complex128", 16, "complex"),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in _ALL if dtype.safetensors}

# torch.save names a storage by its class; newer dtypes all use UntypedStorage and name the dtype apart
# (torch/serialization.py persistent_id, torch/_utils.py _rebuild_tensor_v3).
BY_STORAGE_CLASS = {
    "DoubleStorage": BY_NAME["float64"],
    "FloatStorage": BY_NAME["float32"],
    "HalfStorage": BY_NAME["float16"],
    "BFloat16Storage": BY_NAME["bfloat16"],
    "LongStorage": BY_NAME["int64"],
    "IntStorage": BY_NAME["int32"],
    "ShortStorage": BY_NAME["int16"],
    "CharStorage": BY_NAME["int8"],
    "ByteStorage": BY_NAME["uint8"],
    "BoolStorage": BY_NAME["bool"],
    "ComplexFloatStorage": BY_NAME["complex64"],
    "ComplexDoubleStorage": BY_NAME["complex128"],
}
