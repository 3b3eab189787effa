"""Files of many storages against torch.save itself, read back by torch and by our own reader."""

from __future__ import annotations

import io
import subprocess
import sys
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_states import elements, every_kind

from ckptguard.core.writing import Elements, WritePlan
from ckptguard.engine import writing
from ckptguard.engine.staging import Staging
from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint
from ckptguard.formats.torch_file_writer import StorageToWrite, torch_file
from ckptguard.megatron.legacy_pickles_worker import Placeholder, pickled

PATH = "iter_0000001/mp_rank_00/model_optim_rng.pt"


class Target:
    """The file of a value whose tensors under "later" are filled in later, each in runs of two lengths."""

    def __init__(self, value: Mapping[str, Any], path: str = PATH) -> None:
        later = list(value["later"].values())
        placeholders = {
            name: Placeholder(number, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for number, (name, tensor) in enumerate(value["later"].items())
        }
        pickle, storages = pickled({**value, "later": OrderedDict(placeholders)})
        self.data = [elements(tensor)[1].tobytes() for tensor in later]
        self.file = torch_file(path, pickle, [self._storage(key, s) for key, s in enumerate(storages)])

    def _storage(self, key: int, content: bytes | int) -> StorageToWrite:
        if isinstance(content, bytes):
            return StorageToWrite(str(key), content)
        whole = len(self.data[content])
        parts = (Elements(2 * content, whole // 3), Elements(2 * content + 1, whole - whole // 3))
        return StorageToWrite(str(key), parts)

    def fill(self, key: int, begin_bytes: int, out: memoryview) -> None:
        """Bytes of a run."""
        data = self.data[key // 2]
        begin = begin_bytes + (len(data) // 3 if key % 2 else 0)
        out[:] = data[begin : begin + len(out)]

    def write(self, dst: Path) -> Path:
        """Writes the file below dst."""
        of = WritePlan((self.file,), "one file")
        with Staging.open(dst, of.identity, what="a test") as staging:
            writing.write(of, staging, self.fill, memory_bytes=1 << 20, threads=2)
            staging.commit({})
        return dst / self.file.path


def state() -> dict[str, Any]:
    """Of every dtype, of tensors that are there, of shared ones, and of plain values."""
    shared = torch.arange(12, dtype=torch.float32)
    return {
        "args": {"hidden_size": 64, "params_dtype": torch.bfloat16},
        "later": OrderedDict(every_kind(views=False)),
        "rng_state": [{"cuda": torch.arange(100, dtype=torch.uint8), "shared": shared, "view": shared[3:7]}],
        "none": None,
        "text": "e",
    }


def test_byte_for_byte_the_file_of_torch_save(tmp_path: Path) -> None:
    """Of the serialization id's 20 digits and their record's CRC-32, which stands twice, nothing is read by anyone."""
    (tmp_path / "theirs").mkdir()
    theirs = tmp_path / "theirs" / "model_optim_rng.pt"
    torch.save(state(), theirs)
    ours = Target(state()).write(tmp_path / "ours")
    first, second = theirs.read_bytes(), ours.read_bytes()
    assert len(first) == len(second)
    apart = [n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    record = b".data/serialization_id"
    entries = (first.index(record), first.rindex(record))  # the record, and its entry in the directory
    assert all(entries[0] < n < entries[0] + 150 or entries[1] - 60 < n < entries[1] for n in apart)
    assert len(apart) <= 28


def test_torch_loads_it(tmp_path: Path) -> None:
    loaded = torch.load(Target(state()).write(tmp_path / "c"), weights_only=True)
    for name, tensor in state()["later"].items():
        assert elements(loaded["later"][name])[0] == elements(tensor)[0]
        assert (elements(loaded["later"][name])[1] == elements(tensor)[1]).all(), name
    assert torch.equal(loaded["rng_state"][0]["view"], state()["rng_state"][0]["view"])
    assert loaded["text"] == "e"


def test_our_reader_finds_every_tensor_and_its_crc(tmp_path: Path) -> None:
    Target(state()).write(tmp_path / "c")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("1")
    with open_checkpoint(tmp_path / "c") as checkpoint:
        for name, tensor in state()["later"].items():
            entry = checkpoint.index.tensors[f"mp_rank_00/model_optim_rng.pt:later.{name}"]
            (chunk,) = entry.chunks
            data = elements(tensor)[1].tobytes()
            assert (entry.dtype.name, entry.shape) == (elements(tensor)[0], tuple(tensor.shape))
            assert chunk.crc32 == (zlib.crc32(data) if data else None)
            assert checkpoint.files.read_span(chunk.span) == data


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = Target({"later": OrderedDict(), "buckets_coalesced": True}, "distrib_optim.pt").write(tmp_path / "c")
    assert torch.load(path) == {"later": {}, "buckets_coalesced": True}


def test_more_records_than_a_plain_zip_counts() -> None:
    """From 65535 records on their number stands in the 64-bit directory only; torch reads such files."""
    count = 0x10000
    file = torch_file("many.pt", b"", [StorageToWrite(str(n), b"x") for n in range(count)])
    literal, ending = file.parts
    whole = literal.data + ending.make(())
    assert whole[-14:-10] == b"\xff\xff\xff\xff"
    reader = torch._C.PyTorchFileReader(io.BytesIO(whole))
    assert len(reader.get_all_records()) >= count + 4
    assert reader.get_record(f"data/{count - 1}") == b"x"


@pytest.mark.parametrize("length", [(1 << 32) - 65, (1 << 32) - 1], ids=["offsets pass 4 GiB", "the size does too"])
def test_beyond_4_gib_as_torch_itself(tmp_path: Path, length: int) -> None:
    """Two storages, the second beyond the first's 4 GiB; nothing of them is ever written, on either side."""
    path = tmp_path / "model_optim_rng.pt"
    with torch.serialization.skip_data():
        torch.save([torch.empty(length, dtype=torch.uint8), torch.empty(70, dtype=torch.uint8)], path)
    pickle, storages = pickled([Placeholder(0, "uint8", (length,)), Placeholder(1, "uint8", (70,))])
    assert storages == [0, 1]
    content = [(Elements(0, length),), (Elements(1, 70),)]
    file = torch_file(PATH, pickle, [StorageToWrite(str(n), part) for n, part in enumerate(content)])
    theirs = path.stat().st_size
    assert file.size_bytes == theirs
    head = file.parts[0].data
    with path.open("rb") as handle:
        assert handle.read(len(head)) == head
        handle.seek(len(head) + length)
        between = file.parts[2].length_bytes + len(file.parts[3].data)
        descriptor, header = handle.read(between)[: file.parts[2].length_bytes], file.parts[3].data
        assert file.parts[2].make(0)[8:] == descriptor[8:]
        handle.seek(len(head) + length + file.parts[2].length_bytes)
        assert handle.read(len(header)) == header


def test_two_storages_of_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match="same key"):
        torch_file(PATH, b"", [StorageToWrite("0", b"a"), StorageToWrite("0", b"b")])


def test_the_writer_needs_no_torch() -> None:
    code = "import sys, ckptguard.formats.torch_file_writer; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_damage_is_found_by_crc(tmp_path: Path) -> None:
    path = Target(state()).write(tmp_path / "c")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("1")
    assert not verify(tmp_path / "c").damaged
    data = bytearray(path.read_bytes())
    data[data.index(elements(every_kind()["long"])[1].tobytes())] ^= 1
    path.write_bytes(data)
    found = [problem.message for problem in verify(tmp_path / "c").problems if problem.is_damage]
    assert any("later.long" in message for message in found), found
