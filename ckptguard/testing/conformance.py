"""The suite that every format must pass. A test module subclasses ``FormatTests`` and says how to make checkpoints.

The checkpoints are made by the format's own writers (torch, safetensors, Megatron), never by ckptguard.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.engine import structure
from ckptguard.engine.diff import diff_checkpoints
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.seal import seal
from ckptguard.engine.verify import verify
from ckptguard.fingerprint.tensors import fingerprint_array
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.damage import data_files

Expected = Mapping[
    str, tuple[str, npt.NDArray[Any]]
]  # name -> (torch dtype name, elements as any array of the itemsize)


def read_whole(checkpoint: Checkpoint, name: str) -> npt.NDArray[np.uint8]:
    """All elements of a tensor, row-major, as bytes of shape (elements, itemsize); put together from its chunks."""
    entry = checkpoint.index.tensors[name]
    out = np.zeros((entry.numel, entry.dtype.itemsize), np.uint8)
    numbers = np.arange(entry.numel).reshape(entry.shape)
    for chunk in entry.chunks:
        at = checkpoint.reader.locate(entry, chunk)
        data = checkpoint.reader.read_box(at, (0,) * len(entry.shape), chunk.box.size)
        box = tuple(slice(o, e) for o, e in zip(chunk.box.offset, chunk.box.end, strict=True))
        out[numbers[box].reshape(-1)] = data.reshape(-1, entry.dtype.itemsize)
    return out


class FormatTests:
    """What holds for every format. Subclasses set ``format_name`` and implement ``make``."""

    format_name: ClassVar[str]

    def make(self, path: Path) -> Expected:
        """Writes a checkpoint into the path, with the format's own writer, and returns what is in it."""
        raise NotImplementedError

    @pytest.fixture
    def made(self, tmp_path: Path) -> tuple[Path, Expected]:
        """A checkpoint and what is in it."""
        path = tmp_path / "ckpt"
        return path, self.make(path)

    def test_is_recognised(self, made: tuple[Path, Expected]) -> None:
        """Its format is found by looking at it."""
        with open_checkpoint(made[0]) as checkpoint:
            assert checkpoint.index.format == self.format_name

    def test_names_dtypes_and_shapes(self, made: tuple[Path, Expected]) -> None:
        """Every tensor is there, none besides."""
        with open_checkpoint(made[0]) as checkpoint:
            found = {n: (e.dtype.name, e.shape) for n, e in checkpoint.index.tensors.items()}
        assert found == {n: (dtype, array.shape) for n, (dtype, array) in made[1].items()}

    def test_elements(self, made: tuple[Path, Expected]) -> None:
        """Every element is what was written, bit for bit."""
        with open_checkpoint(made[0]) as checkpoint:
            for name, (_, array) in made[1].items():
                expected = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                assert np.array_equal(read_whole(checkpoint, name).reshape(-1), expected), name

    def test_fingerprints(self, made: tuple[Path, Expected]) -> None:
        """Streaming from the files gives the fingerprint of the array in memory."""
        with open_checkpoint(made[0]) as checkpoint:
            found = fingerprint_checkpoint(checkpoint)
        assert found == {n: fingerprint_array(a, BY_NAME[dtype]) for n, (dtype, a) in made[1].items()}

    def test_is_clean(self, made: tuple[Path, Expected]) -> None:
        """No false alarm, before and after it is sealed."""
        path, _ = made
        report = verify(path)
        assert not report.damaged, report.problems
        with open_checkpoint(path) as checkpoint:
            assert not [p for p in structure.check(checkpoint.index) if p.is_damage]
            seal(checkpoint)
        for mode in ("full", "quick"):
            report = verify(path, mode=mode)
            assert not report.damaged, report.problems
            assert report.seal

    def test_equals_itself(self, made: tuple[Path, Expected]) -> None:
        """Compared with itself it is the same in every tensor."""
        with open_checkpoint(made[0]) as a, open_checkpoint(made[0]) as b:
            assert {d.status for d in diff_checkpoints(a, b)} == {"same"}

    def test_cut_files(self, made: tuple[Path, Expected]) -> None:
        """Each data file cut short is damage even without a seal, and never a crash."""
        path, _ = made
        for file in data_files(path):
            size = file.stat().st_size
            data = file.read_bytes()
            os.truncate(file, size - 1 - size // 3)
            with contextlib.suppress(DamagedError):
                assert verify(path).damaged, file
            file.write_bytes(data)

    def test_boxes(self, made: tuple[Path, Expected]) -> None:
        """Any box of a chunk can be read by itself."""
        rng = np.random.default_rng(0)
        with open_checkpoint(made[0]) as checkpoint:
            for name, (_, array) in made[1].items():
                entry = checkpoint.index.tensors[name]
                if len(entry.chunks) != 1 or entry.chunks[0].box != whole(entry.shape) or not entry.numel:
                    continue
                at = checkpoint.reader.locate(entry, entry.chunks[0])
                low = [int(rng.integers(0, n)) for n in entry.shape]
                high = [int(rng.integers(lo, n)) + 1 for lo, n in zip(low, entry.shape, strict=True)]
                box = tuple(slice(lo, hi) for lo, hi in zip(low, high, strict=True))
                size = tuple(hi - lo for lo, hi in zip(low, high, strict=True))
                data = checkpoint.reader.read_box(at, tuple(low), size)
                assert np.array_equal(data, np.ascontiguousarray(array[box]).reshape(-1).view(np.uint8)), (name, box)

    def test_empty_directory_is_explained(self, tmp_path: Path) -> None:
        """A path of no format gets one error that says why not, for each."""
        (tmp_path / "nothing").mkdir()
        with pytest.raises(CkptguardError) as caught:
            open_checkpoint(tmp_path / "nothing")
        assert (
            self.format_name
            in {"torch_dist", "dcp", "torch", "huggingface"}
            <= set(getattr(caught.value, "reasons", {}))
        )
