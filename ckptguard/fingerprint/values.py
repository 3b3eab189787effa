"""The fingerprint as a value: what it is and how parts add up. No numpy, no compiled code; ``tensors`` computes it."""

from __future__ import annotations

from dataclasses import dataclass

PRIME = (1 << 61) - 1
# Every parameter that changes the value: modulus, lanes, digit base, word width for elements wider than a byte.
ALGORITHM = "cgfp1-m61-l2-d4096-w16"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The content of a global tensor.

    Attributes:
        dtype: torch's name of the element type.
        shape: Global shape.
        sums: The weighted sum modulo 2**61 - 1 of each lane.
    """

    dtype: str
    shape: tuple[int, ...]
    sums: tuple[int, int]

    @property
    def hex(self) -> str:
        """Both lanes, 16 hexadecimal digits each."""
        return f"{self.sums[0]:016x}{self.sums[1]:016x}"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}:{self.hex}"

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """The fingerprint of two disjoint parts of one tensor.

        Raises:
            ValueError: They are parts of tensors of different dtype or shape.
        """
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(f"{self} and {other} are no parts of one tensor")
        return Fingerprint(self.dtype, self.shape, add(self.sums, other.sums))


def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Adds two pairs of sums modulo p."""
    return (a[0] + b[0]) % PRIME, (a[1] + b[1]) % PRIME
