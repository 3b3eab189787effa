"""Checkpoints made by our byte makers: equal to Megatron's own files, and loaded by torch, by Megatron and by ckptguard.

Run as a program, ``test_torch_dist_writer.py FOLDER OUT``, it has Megatron load a checkpoint on a CPU.
"""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch_states import every_kind

from ckptguard.core.boxes import Box, split_rows, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.index import Index
from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint
from ckptguard.formats.torch_dist_writer import (
    BlobToWrite,
    ChunkToWrite,
    PlacedFile,
    config_bytes,
    file_name,
    metadata_bytes,
    ordered,
    place,
)
from ckptguard.formats.zip_frames import empty_tensor_in_list, frame
from ckptguard.testing.conformance import read_whole

REAL = sorted((Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19").glob("*/iter_*/.metadata"))
COMMON, EXTRA = "common_state/shard_0_1", "decoder.layers.linear_proj._extra_state/shard_0_1"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def as_planned(step: Path, index: Index) -> list[PlacedFile]:
    """What a real checkpoint holds, as items in the order in which they stand."""
    files = []
    for name, spans in sorted(index.spans().items()):
        data, items = (step / name).read_bytes(), []
        for span, key, chunk in spans:
            if chunk is None:
                items.append(BlobToWrite(key, data[span.offset_bytes : span.end_bytes]))
            else:
                entry = index.tensors[key]
                items.append(ChunkToWrite(key, entry.dtype, entry.shape, chunk.box))
        assert ordered(items) == tuple(items)
        files.append(place(name, items))
    return files


@pytest.mark.parametrize("metadata", REAL, ids=lambda path: path.parts[-3])
def test_a_real_save_again_byte_for_byte(metadata: Path) -> None:
    """Megatron's files, taken apart and made again from keys, boxes and the data alone."""
    step = metadata.parent
    with open_checkpoint(step) as checkpoint:
        files = as_planned(step, checkpoint.index)
    assert [file.name for file in files] == [file_name(rank) for rank in range(len(files))]
    for file in files:
        theirs, ours = (step / file.name).read_bytes(), []
        for placed in file.items:
            item, at = placed.item, placed.span.offset_bytes
            if isinstance(item, BlobToWrite):
                ours.append(item.data)
                continue
            around = frame(item.dtype, item.box.size)
            data = theirs[at + around.data_begin_bytes :][: around.data_bytes]
            ours.append(around.head + data + around.tail(zlib.crc32(data)))
        assert b"".join(ours) == theirs
        assert file.size_bytes == len(theirs)
    made, real = pickle.loads(metadata_bytes(files)), pickle.loads(metadata.read_bytes())
    assert made.state_dict_metadata == real.state_dict_metadata
    assert list(made.storage_data.items()) == list(real.storage_data.items())
    assert (made.version, made.planner_data) == (real.version, real.planner_data)
    assert config_bytes() == (step / "metadata.json").read_bytes()


def state() -> dict[str, torch.Tensor]:
    return every_kind(views=False) | {"grid": torch.randn(7, 10, 3, generator=torch.Generator().manual_seed(3))}


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All dtypes in chunks of uneven rows over three files, and a tensor cut along every dim."""
    folder = tmp_path_factory.mktemp("written")
    per_rank: list[list[ChunkToWrite | BlobToWrite]] = [[], [], []]
    for number, (name, tensor) in enumerate(state().items()):
        shape, dtype = tuple(tensor.shape), BY_NAME[str(tensor.dtype).removeprefix("torch.")]
        boxes = list(split_rows(whole(shape), 20)) if tensor.numel() < 1000 else [whole(shape)]
        if name == "grid":
            cuts = [((0, 4), (4, 7)), ((0, 10),), ((0, 1), (1, 3))]
            boxes = [Box((a, c, e), (b - a, d - c, f - e)) for a, b in cuts[0] for c, d in cuts[1] for e, f in cuts[2]]
        for at, box in enumerate(boxes):
            per_rank[(number + at) % 3].append(ChunkToWrite(name, dtype, shape, box))
    per_rank[0].append(BlobToWrite(COMMON, saved([{"iteration": 5, "content_metadata": {}}])))
    per_rank[2].append(BlobToWrite(EXTRA, empty_tensor_in_list()))
    files = [place(file_name(rank), ordered(items)) for rank, items in enumerate(per_rank)]
    for file in files:
        with (folder / file.name).open("wb") as stream:
            for placed in file.items:
                assert stream.tell() == placed.span.offset_bytes
                item = placed.item
                if isinstance(item, BlobToWrite):
                    stream.write(item.data)
                    continue
                box = tuple(slice(b, e) for b, e in zip(item.box.offset, item.box.end, strict=True))
                data, around = raw(state()[item.name][box]), frame(item.dtype, item.box.size)
                stream.write(around.head + data + around.tail(zlib.crc32(data)))
        assert (folder / file.name).stat().st_size == file.size_bytes
    (folder / ".metadata").write_bytes(metadata_bytes(files))
    assert metadata_bytes(files) == metadata_bytes(tuple(files))
    (folder / "metadata.json").write_bytes(config_bytes())
    return folder


def test_objects_stand_before_chunks() -> None:
    a, b = (chunk(name, (4,), whole((4,))) for name in "ab")
    c, d = BlobToWrite("c", b"1"), BlobToWrite("d", b"22")
    assert ordered([b, d, a, c]) == (d, c, b, a)


def test_torch_loads_it(written: Path) -> None:
    # torch has no kernel that copies packed fp4 into another tensor; its bytes are read through the index below.
    target = {name: torch.empty_like(t) for name, t in state().items() if "float4" not in name}
    dcp.load(target, storage_reader=dcp.FileSystemReader(written), no_dist=True)
    for name, tensor in target.items():
        assert raw(tensor) == raw(state()[name]), name


def test_we_read_it_and_find_no_fault(written: Path) -> None:
    with open_checkpoint(written) as checkpoint:
        assert checkpoint.index.format == "torch_dist"
        assert checkpoint.index.facts.iteration == 5
        assert set(checkpoint.index.tensors) == set(state())
        assert set(checkpoint.index.objects) == {COMMON, EXTRA}
        for name, tensor in state().items():
            assert read_whole(checkpoint, name).tobytes() == raw(tensor), name
    report = verify(written)
    assert [problem.kind for problem in report.problems] == ["note"], report.problems  # it is not sealed


@pytest.mark.megatron
@pytest.mark.slow
def test_megatron_loads_it(written: Path, tmp_path: Path) -> None:
    out = tmp_path / "loaded.pt"
    command = [sys.executable, __file__, str(written), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = torch.load(out)
    assert loaded.pop("iteration") == 5
    assert loaded.pop("content_metadata") == {}
    extra = loaded.pop("extra")
    assert (extra.dtype, extra.numel()) == (torch.uint8, 0)
    rows, expected = loaded.pop("rows"), state()
    assert raw(rows) == raw(expected["kind.bfloat16"][3:6])
    assert set(loaded) == {name for name in expected if "float4" not in name}
    for name, tensor in loaded.items():
        assert raw(tensor) == raw(expected[name]), name


def load_with_megatron(folder: str, out: str) -> None:
    """Loads every tensor whole, one of them once more as the second of two shards, the object and the common state."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    half = torch.empty(3, 10, dtype=torch.bfloat16)
    asked: dict[str, object] = {
        name: tensor
        for name, tensor in dist_checkpointing.load_tensors_metadata(folder).items()
        if "float4" not in name
    }
    asked["rows"] = ShardedTensor.from_rank_offsets("kind.bfloat16", half, (0, 1, 2))
    asked["extra"] = ShardedObject("decoder.layers.linear_proj._extra_state", None, (1,), (0,))
    torch.save(dist_checkpointing.load(asked, folder, validate_access_integrity=False), out)


def chunk(name: str, shape: tuple[int, ...], box: Box, dtype: str = "float32") -> ChunkToWrite:
    return ChunkToWrite(name, BY_NAME[dtype], shape, box)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([chunk("a", (4,), Box((0,), (2,))), chunk("a", (4,), Box((0,), (2,)))], "begin at the same place"),
        ([chunk("a", (4,), Box((0,), (2,))), chunk("a", (5,), Box((2,), (2,)))], "dtype or global shape"),
        ([chunk("a", (4,), Box((0,), (2,))), chunk("a", (4,), Box((2,), (2,)), "int32")], "dtype or global shape"),
        ([BlobToWrite("a", b""), BlobToWrite("a", b"")], "the same name"),
        ([BlobToWrite("a", b""), chunk("a", (4,), Box((0,), (4,)))], "the same name"),
        ([chunk("a", (4,), Box((2,), (3,)))], "not inside a tensor"),
    ],
)
def test_plans_that_contradict_themselves(items: list[ChunkToWrite | BlobToWrite], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metadata_bytes([place("__0_0.distcp", items)])


def test_long_names_and_large_files() -> None:
    """Names of 256 bytes and more, offsets past 2 and 4 GiB, more memo entries than one byte counts."""
    name = "ä" * 200
    items = [chunk(name, (1 << 40,), Box((n << 30,), (1 << 30,))) for n in range(300)]
    file = place("__0_0.distcp", [*items, BlobToWrite("empty", b"")])
    made = pickle.loads(metadata_bytes([file]))
    assert [c.offsets for c in made.state_dict_metadata[name].chunks] == [torch.Size([n << 30]) for n in range(300)]
    assert [(i.offset, i.length) for i in made.storage_data.values()] == [
        (p.span.offset_bytes, p.span.length_bytes) for p in file.items
    ]
    empty = pickle.loads(metadata_bytes([]))
    assert (empty.state_dict_metadata, empty.storage_data) == ({}, {})


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; from ckptguard.formats.torch_dist_writer import *; from ckptguard.core.dtypes import BY_NAME;"
        "from ckptguard.core.boxes import whole;"
        "metadata_bytes([place('x', [ChunkToWrite('a', BY_NAME['int8'], (2,), whole((2,)))])]);"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


if __name__ == "__main__":
    load_with_megatron(*sys.argv[1:])
