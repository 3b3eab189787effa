"""torch DCP as torch writes it: both serialisations, compressed, several ranks; and Megatron's torch_dist marker on top."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch_states import elements, every_kind

from ckptguard.core.errors import CkptguardError, UnsupportedError
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing.conformance import Expected, FormatTests

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(state: dict, path: Path, **writer: object) -> Expected:
    dcp.save(state, storage_writer=FileSystemWriter(path, **writer), no_dist=True)
    return {name: elements(tensor) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


class TestDcp(FormatTests):
    format_name = "dcp"

    def make(self, path: Path) -> Expected:
        return save(every_kind() | {"step": 3, "text": "x"}, path, thread_count=2)


class TestDcpSafetensors(FormatTests):
    format_name = "dcp"

    def make(self, path: Path) -> Expected:
        kinds = {n: t.contiguous() for n, t in every_kind().items() if "complex" not in n and "uint" not in n}
        return save(kinds, path, serialization_format=SerializationFormat.SAFETENSORS)


class TestDcpCompressed(FormatTests):
    format_name = "dcp"

    def make(self, path: Path) -> Expected:
        return save(every_kind(), path, _extensions=[ZStandard()])


class TestTorchDist(FormatTests):
    format_name = "torch_dist"

    def make(self, path: Path) -> Expected:
        expected = save(every_kind(), path)
        (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
        return expected


def _save_rows(rank: int, path: Path, store: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(7 * 5.0).reshape(7, 5), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(6 * 4.0).reshape(6, 4).to(torch.bfloat16), mesh, [Shard(1)])
    dcp.save({"rows": rows, "columns": columns, "both": torch.ones(3)}, checkpoint_id=path)
    dist.destroy_process_group()


class TestDcpOfTwoRanks(FormatTests):
    format_name = "dcp"

    def make(self, path: Path) -> Expected:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_save_rows, args=(r, path, path.with_suffix(".store"))) for r in (0, 1)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
        return {
            "rows": elements(torch.arange(7 * 5.0).reshape(7, 5)),
            "columns": elements(torch.arange(6 * 4.0).reshape(6, 4).to(torch.bfloat16)),
            "both": elements(torch.ones(3)),
        }


def test_a_zstd_bomb_is_refused(tmp_path: Path) -> None:
    import zstandard

    save({"w": torch.zeros(1000)}, tmp_path / "c", _extensions=[ZStandard()])
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    (file,) = (tmp_path / "c").glob("*.distcp")
    size = file.stat().st_size
    file.write_bytes(bomb[:size].ljust(size, b"\0"))
    with open_checkpoint(tmp_path / "c") as checkpoint, pytest.raises(CkptguardError):
        fingerprint_checkpoint(checkpoint)


def test_an_unknown_transform_is_named(tmp_path: Path) -> None:
    from ckptguard.testing.damage import edit_metadata

    save({"w": torch.zeros(1000)}, tmp_path / "c", _extensions=[ZStandard()])

    def change(metadata) -> None:
        for info in metadata.storage_data.values():
            info.transform_descriptors = ["stream.rot13/1"]

    edit_metadata(tmp_path / "c", change)
    with open_checkpoint(tmp_path / "c") as checkpoint, pytest.raises(UnsupportedError, match="rot13"):
        fingerprint_checkpoint(checkpoint)


def test_another_backend_is_named(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(UnsupportedError, match="zarr"):
        open_checkpoint(tmp_path)


def test_without_stored_crcs_there_is_no_false_alarm(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save({"w": torch.arange(1000.0)}, tmp_path / "c")
    finally:
        torch.serialization.set_crc32_options(before)
    report = verify(tmp_path / "c")
    assert not report.damaged, report.problems
    assert report.bytes_checked == 0


def test_a_large_record_with_64_bit_fields(tmp_path: Path) -> None:
    """torch writes zip64 fields for every record of a file beyond 4 GiB; a sparse file stands for it."""
    from ckptguard.formats.torch_zips import read_torch_zip

    path = tmp_path / "big.pt"
    torch.save(torch.empty(1, dtype=torch.uint8).expand(8), path)
    data = path.read_bytes()

    def read_at(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    archive = read_torch_zip(read_at, len(data), where="x", file="x")
    assert archive.storage(archive.value.storage.key).length_bytes == 1
