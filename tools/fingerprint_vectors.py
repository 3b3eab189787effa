"""Writes the test vectors of docs/fingerprint.md, or checks that the page has those of the code.

Usage::

    python tools/fingerprint_vectors.py [--check] [PAGE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.fingerprint.residues import digit_residues, word_residues
from ckptguard.fingerprint.roots import root
from ckptguard.fingerprint.tensors import fingerprint_array
from ckptguard.fingerprint.values import Fingerprint

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fingerprint.md"
BEGIN, END = "<!-- vectors: made by tools/fingerprint_vectors.py -->\n", "<!-- end of vectors -->\n"


class Vector(NamedTuple):
    """A tensor, or a box of one, whose content its name determines."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] = ()
    size: tuple[int, ...] | None = None

    @property
    def box(self) -> Box:
        """The part to fingerprint."""
        return Box(self.offset, self.size) if self.size is not None else whole(self.shape)


VECTORS = (
    Vector("scalar", "float32", ()),
    Vector("wide scalar", "complex128", ()),
    Vector("empty", "float32", (0, 5)),
    Vector("one byte", "uint8", (1,)),
    Vector("matrix", "bfloat16", (3, 5)),
    Vector("matrix", "float16", (3, 5)),
    Vector("eighths", "float8_e4m3fn", (4, 7)),
    Vector("packed", "float4_e2m1fn_x2", (2, 3, 4)),
    Vector("integers", "int64", (2, 3)),
    Vector("truths", "bool", (9,)),
    Vector("complex", "complex64", (2, 2)),
    Vector("just one digit", "int16", (4096,)),
    Vector("two digits", "int16", (4097,)),
    Vector("long rows", "bfloat16", (2, 5000)),
    Vector("long rows", "bfloat16", (2, 5000), (0, 0), (2, 4090)),
    Vector("long rows", "bfloat16", (2, 5000), (0, 4090), (2, 910)),
    Vector("part", "float32", (6, 8), (2, 3), (3, 4)),
    Vector("far part", "float32", (1 << 40, 3), ((1 << 40) - 2, 0), (2, 3)),
)
ROOT = ("matrix", "scalar", "empty", "tab\there", "back\\slash", "übung")


def content(vector: Vector) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """Elements of the vector's part, as opaque items of the dtype's size.

    The whole tensor's bytes are the extended output of BLAKE3 for the name. A tensor too large for that has the output
    in its part instead.
    """
    dtype, box = BY_NAME[vector.dtype], vector.box
    huge = prod(vector.shape) > 1 << 20
    shape = box.size if huge else vector.shape
    stream = blake3(vector.name.encode()).digest(length=max(1, prod(shape) * dtype.itemsize))
    mask = np.uint8(1 if vector.dtype == "bool" else 255)
    data = np.frombuffer(stream, np.uint8)[: prod(shape) * dtype.itemsize] & mask
    elements = data.view(np.dtype((np.void, dtype.itemsize))).reshape(shape)
    return elements if huge else elements[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]


def fingerprint(vector: Vector) -> Fingerprint:
    """What the package makes of a vector."""
    return fingerprint_array(content(vector), BY_NAME[vector.dtype], vector.shape, vector.box.offset)


def root_fingerprints() -> dict[str, Fingerprint]:
    """The named set of the root's vector: the vectors of those names, and the scalar under names to be escaped."""
    known = {vector.name: fingerprint(vector) for vector in reversed(VECTORS)}
    return {name: known.get(name, known["scalar"]) for name in ROOT}


def section() -> str:
    """The page's text between the markers."""
    return "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    yield "The bytes of a whole tensor, row-major, are the first bytes of BLAKE3's extended output (no key) for the UTF-8"
    yield "bytes of the vector's name; a `bool` is the lowest bit of its byte. *far part* is the exception: there they are the"
    yield "bytes of the part. The column *begins* shows up to 8 bytes of the part's content, in the order of its elements."
    yield "The two parts of *long rows* add up to the whole; *matrix* has one content under two dtypes."
    yield ""
    yield "| name | dtype | global shape | part: offset, size | begins | hex |"
    yield "|---|---|---|---|---|---|"
    for vector in VECTORS:
        part = "" if vector.size is None else f"{list(vector.offset)}, {list(vector.size)}"
        begins = np.ascontiguousarray(content(vector)).tobytes()[:8].hex(" ")
        made = fingerprint(vector).hex
        yield f"| {vector.name} | `{vector.dtype}` | {list(vector.shape)} | {part} | `{begins or ' '}` | `{made}` |"
    yield ""
    yield "The first two residues of some labels:"
    yield ""
    yield "| label | residue 0 | residue 1 |"
    yield "|---|---|---|"
    for lane in (0, 1):
        yield f"| `lane {lane} word` | `{word_residues(lane)[0]:016x}` | `{word_residues(lane)[1]:016x}` |"
    for lane, dim, place in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 2, 3)):
        row = digit_residues(lane, dim, place)
        yield f"| `lane {lane} dim {dim} place {place}` | `{row[0]:016x}` | `{row[1]:016x}` |"
    yield ""
    yield "The root of six tensors: *matrix* (bfloat16), *scalar* and *empty* under their names, and *scalar* again under each"
    yield "of the names `tab<TAB>here`, `back\\slash` and `übung`, where `<TAB>` is byte 9:"
    yield ""
    yield f"    {root(root_fingerprints())}"
    yield ""
    yield f"The root of no tensors: `{root({})}`"


def with_vectors(page: str) -> str:
    """The page with the section between its markers replaced."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + section() + END + rest.split(END)[1]


def main() -> int:
    """Runs the tool; 1 if ``--check`` finds a stale page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    parser.add_argument("page", nargs="?", type=Path, default=PAGE)
    options = parser.parse_args()
    old = options.page.read_text(encoding="utf-8")
    new = with_vectors(old)
    if options.check:
        return int(old != new)
    options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
