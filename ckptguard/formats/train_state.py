"""Megatron-Bridge's tracker ``latest_train_state.pt``: which iteration it names.

Source: megatron/bridge/training/state.py ``TrainState.state_dict`` (0.6.2): torch.save of a dict of 0-dim tensors, ``step`` of
int64; utils/checkpoint_utils.py ``read_train_state``.
"""

from __future__ import annotations

from ckptguard.core.errors import DamagedError
from ckptguard.core.problems import Problem
from ckptguard.formats.pickles import TensorRef
from ckptguard.formats.torch_zips import TorchZip, read_torch_zip
from ckptguard.formats.trackers import LATEST_TRAIN_STATE

_INTEGERS = frozenset({"int8", "int16", "int32", "int64"})


def tracked_step(data: bytes, *, where: str) -> int:
    """The iteration that a tracker names.

    Args:
        data: The whole file.
        where: Its path, for messages.

    Raises:
        DamagedError: It is not a whole file of torch.save, or holds no whole number ``step``.
        UnsafePickleError: Its pickle names something outside the allow-list.
        UnsupportedError: It is big-endian.
    """

    def read_at(offset: int, count: int) -> bytes:
        if offset < 0 or count < 0 or offset + count > len(data):
            raise ValueError(f"bytes {offset} to {offset + count} of {len(data)}")
        return data[offset : offset + count]

    archive = read_torch_zip(read_at, len(data), where=where, file=LATEST_TRAIN_STATE)
    said = archive.value.get("step") if isinstance(archive.value, dict) else None
    step = _scalar(archive, said, data) if isinstance(said, TensorRef) else said
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        message = f"{where}: holds no iteration under 'step'"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=LATEST_TRAIN_STATE)])
    return step


def _scalar(archive: TorchZip, ref: TensorRef, data: bytes) -> int | None:
    """The value of a 0-dim tensor of whole numbers."""
    record = archive.records.get(f"data/{ref.storage.key}")
    begin, width = ref.offset * ref.dtype.itemsize, ref.dtype.itemsize
    if record is None or ref.size or ref.dtype.name not in _INTEGERS or not 0 <= begin <= record.length_bytes - width:
        return None
    at = record.data_bytes + begin
    return int.from_bytes(data[at : at + width], "little", signed=True)
