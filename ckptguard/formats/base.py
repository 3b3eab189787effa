"""The one protocol that every format implements, and what an open checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptguard.core.index import Index
from ckptguard.formats.chunks import Reader
from ckptguard.formats.storage import Directory
from ckptguard.formats.trackers import LATEST_TRAIN_STATE, TEXT


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An index together with the way to its bytes. A context manager: leaving it closes the files."""

    index: Index
    files: Directory
    reader: Reader

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.files.close()


class Format(Protocol):
    """A format on disk.

    ``why_not`` decides by looking, never by the name of the path; ``read_index`` is called only after it answered None.
    Both are idempotent and read no tensor data.
    """

    name: str

    def why_not(self, path: Path) -> str | None:
        """None if the path is of this format, else a short reason that completes "not this format: ..."."""

    def open_files(self, path: Path) -> Directory:
        """The directory whose files make up the checkpoint."""

    def read_index(self, files: Directory) -> Index:
        """Reads the index.

        Raises:
            DamagedError: It is of this format but cannot be read; other problems are collected in the index.
            UnsupportedError: A variant that is known and not supported.
        """


def trackers_of(root: Path) -> dict[str, str]:
    """The tracker files of a checkpoint root and what they say (``latest_checkpointed_iteration.txt``)."""
    out = {}
    text = root / TEXT
    if text.is_file():
        out[text.name] = text.read_text(errors="replace").strip()[:64]
    state = root / LATEST_TRAIN_STATE
    if state.is_file():
        out[state.name] = "present"
    return out


def steps_below(root: Path) -> dict[str, Path]:
    """Iteration directories of a root: "123" -> iter_0000123, "release" -> release. Sorted by step."""
    found = {}
    for path in sorted(root.iterdir()):
        if path.is_dir() and path.name.startswith("iter_") and path.name[5:].isdigit():
            found[str(int(path.name[5:]))] = path
        elif path.is_dir() and path.name == "release":
            found["release"] = path
    return found
