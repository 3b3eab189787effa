"""The zip files that torch.save writes, read in place: where each record's bytes are, without loading anything.

Records are stored uncompressed and aligned, so a tensor's elements can be read straight out of the file. Source:
caffe2/serialize/inline_container.cc and torch/serialization.py (2.14.1): ``<name>/data.pkl`` holds the pickle,
``<name>/data/<key>`` one record per storage, ``<name>/byteorder`` "little" or "big".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.core.problems import Problem
from ckptguard.formats.pickles import load
from ckptguard.formats.zip_checks import ReadAt, ZipRecord, stored_records


@dataclass(frozen=True, slots=True)
class TorchZip:
    """What a zip made by torch.save holds.

    Attributes:
        records: By name without the leading folder.
        value: The unpickled object, inert (see ``formats.pickles``).
    """

    records: dict[str, ZipRecord]
    value: Any

    def storage(self, key: str) -> ZipRecord:
        """The record of a storage. Raises KeyError if there is none."""
        return self.records[f"data/{key}"]


def read_torch_zip(read_at: ReadAt, length_bytes: int, *, where: str, file: str, tensor: str | None = None) -> TorchZip:
    """Reads the directory and the pickle of a zip, and none of its storages.

    Args:
        read_at: Reads bytes of the zip by offset and length.
        length_bytes: Length of the whole zip.
        where: What is read, for messages.
        file: Relative path for the problem record.
        tensor: Tensor or object concerned, for the problem record.

    Raises:
        DamagedError: The zip is not whole, or its pickle is not.
        UnsafePickleError: Its pickle names something outside the allow-list.
        UnsupportedError: The data are big-endian.
    """
    records = {r.name: r for r in stored_records(read_at, length_bytes, where=where, file=file, tensor=tensor)}
    try:
        pickle = records["data.pkl"]
        order = records.get("byteorder")
        byte_order = read_at(order.data_bytes, order.length_bytes) if order else b"little"
        if byte_order == b"big":
            raise UnsupportedError(
                f"{where}: was written on a big-endian machine", next_step="Save it again on a little-endian one."
            )
        if byte_order != b"little":
            raise ValueError(f"its byte order is {byte_order[:16]!r}")
        data = read_at(pickle.data_bytes, pickle.length_bytes)
    except ValueError as error:
        message = f"{where}: not a whole file of torch.save: {error}"
        raise DamagedError(message, problems=[Problem("unreadable", message, file=file, tensor=tensor)]) from error
    return TorchZip(records, load(data, where=where, file=file, tensor=tensor))
