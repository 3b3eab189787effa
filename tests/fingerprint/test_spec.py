"""The specification page: its vectors are those of the code, and of a second implementation that knows only the page."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import slow_reference
from blake3 import blake3

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "fingerprint.md"
ROW = re.compile(r"^\| ([\w ]+) \| `(\w+)` \| (\[.*?\]) \| (.*?) \| `([0-9a-f ]+)` \| `([0-9a-f]{32})` \|$")


def _tool() -> ModuleType:
    path = REPOSITORY / "tools" / "fingerprint_vectors.py"
    spec = importlib.util.spec_from_file_location("fingerprint_vectors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _rows() -> list[tuple[str, ...]]:
    return [found.groups() for line in PAGE.read_text(encoding="utf-8").splitlines() if (found := ROW.match(line))]


def test_page_has_the_vectors_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert _tool().with_vectors(page) == page, "run tools/fingerprint_vectors.py"


def test_page_has_vectors_of_every_kind() -> None:
    rows = _rows()
    assert len(rows) >= 17
    assert {"bool", "bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", "int64", "complex64"} <= {row[1] for row in rows}


def _part_bytes(name: str, dtype: str, shape: list[int], offset: list[int], size: list[int]) -> bytes:
    """The content as the page describes it, of the part."""
    width = slow_reference.itemsize(dtype)
    whole = size if name == "far part" else shape
    count = width
    for extent in whole:
        count *= extent
    stream = blake3(name.encode()).digest(length=count) if count else b""
    if dtype == "bool":
        stream = bytes(byte & 1 for byte in stream)
    if name == "far part":
        return stream
    elements = dict(slow_reference.box_elements(dtype, [0] * len(shape), shape, stream))
    wanted = slow_reference.box_elements(dtype, offset, size, b"")
    return b"".join(elements[coordinates] for coordinates, _ in wanted)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row[0]}-{row[1]}-{row[3]}")
def test_slow_reference_makes_the_vector(row: tuple[str, ...]) -> None:
    name, dtype, shape_text, part, begins, expected = row
    shape = ast.literal_eval(shape_text)
    offset, size = ast.literal_eval(f"({part})") if part else ([0] * len(shape), shape)
    data = _part_bytes(name, dtype, shape, offset, size)
    assert data[:8].hex(" ") == begins.strip()
    assert slow_reference.fingerprint_hex(dtype, shape, offset, size, data) == expected


def test_slow_reference_makes_the_residues() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(lane .*?)` \| `([0-9a-f]{16})` \| `([0-9a-f]{16})` \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for label, first, second in rows:
        assert [f"{value:016x}" for value in slow_reference.residues(label, 2)] == [first, second]


def test_slow_reference_makes_the_roots() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = {row[0]: row for row in reversed(_rows())}
    names = {name: rows[name] for name in ("matrix", "scalar", "empty")}
    names |= dict.fromkeys(("tab\there", "back\\slash", "übung"), rows["scalar"])
    entries = [(name, row[1], ast.literal_eval(row[2]), row[5]) for name, row in names.items()]
    assert f"\n    {slow_reference.root(entries)}\n" in page
    assert f"The root of no tensors: `{slow_reference.root([])}`" in page


@pytest.mark.parametrize(
    ("extent", "expected"),
    [(0, 1), (1, 1), (2, 1), (4096, 1), (4097, 2), (1 << 24, 2), ((1 << 24) + 1, 3), (1 << 60, 5)],
)
def test_number_of_digits(extent: int, expected: int) -> None:
    from ckptguard.fingerprint.residues import places

    assert slow_reference.places(extent) == places(extent) == expected
