"""What the staged index files of a step say its data files must be: the index, the manifest, Megatron's SHA-256 list."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.core.index import Chunk, FileEntry, Index, Span
from ckptguard.core.problems import Problem
from ckptguard.engine.workers import BUFFER_BYTES
from ckptguard.fingerprint.manifest import FILE_NAME, Manifest, parse
from ckptguard.formats.dcp import METADATA, parse_table
from ckptguard.formats.torch_dist import INTEGRITY

Item = tuple[Span, str, Chunk | None]


class Saved:
    """The staged directory of one step of a distributed checkpoint; its data files need not be there. Thread-safe.

    Attributes:
        manifest: The staged manifest; None where there is none, or it is damaged or of another save.
        sha256: What Megatron's integrity.json says of each file, if it is of this save; else empty.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._index: Index | CkptguardError | None = None
        self._items: Mapping[str, list[Item]] = {}
        self._metadata = _bytes_of(root / METADATA)
        manifest = _bytes_of(root / FILE_NAME)
        self.manifest = self.read_manifest(manifest, str(root / FILE_NAME))[0] if manifest else None
        self.sha256 = self._integrity()

    def read_manifest(self, data: bytes, where: str) -> tuple[Manifest | None, list[Problem]]:
        """A manifest, if it is whole and of the save that the staged index is of; else what is wrong with it."""
        from blake3 import blake3

        try:
            manifest = parse(data, where)
        except CkptguardError as error:
            problems = error.problems if isinstance(error, DamagedError) else ()
            return None, list(problems) or [Problem("manifest", error.message, file=FILE_NAME)]
        sealed = manifest.files.get(METADATA)
        found = "not there" if self._metadata is None else blake3(self._metadata).hexdigest()
        if sealed is None or sealed.blake3 != found:
            says = "does not list it" if sealed is None else f"was made for one with BLAKE3 {sealed.blake3}"
            text = f"{FILE_NAME}: of another save: the {METADATA} that was agreed on is {found}, the manifest {says}"
            return None, [Problem("manifest", text, file=FILE_NAME)]
        odd = sorted(name for name, file in manifest.files.items() if BUFFER_BYTES % file.block_bytes)
        if odd:
            text = f"{FILE_NAME}: {odd[0]} is digested in blocks of {manifest.files[odd[0]].block_bytes} bytes"
            return None, [Problem("manifest", f"{text}, expected a power of two up to {BUFFER_BYTES}", file=FILE_NAME)]
        return manifest, []

    def _integrity(self) -> Mapping[str, str]:
        """Megatron checks the list itself and at length (core/dist_checkpointing/validation.py, 0.18 and later)."""
        data = _bytes_of(self._root / INTEGRITY)
        try:
            listed = {str(name): str(digest) for name, digest in json.loads(data or b"{}")["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        ours = self._metadata is not None and listed.get(METADATA) == hashlib.sha256(self._metadata).hexdigest()
        return listed if ours else {}

    @property
    def index(self) -> Index:
        """The staged index, without any files.

        Raises:
            CkptguardError: It cannot be read.
        """
        with self._lock:
            if self._index is None:
                try:
                    self._index = self._parse()
                    self._items = self._index.spans()
                except CkptguardError as error:
                    self._index = error
        if isinstance(self._index, CkptguardError):
            raise self._index
        return self._index

    def items(self, file: str) -> list[Item]:
        """What the index says stands in a file, by offset: (span, tensor or object, chunk or None for an object).

        Raises:
            CkptguardError: The staged index cannot be read.
        """
        _ = self.index
        return self._items.get(file, [])

    def index_of(self, file: str, size_bytes: int) -> Index:
        """The index cut down to one file, which need not stand beside it.

        Raises:
            CkptguardError: The staged index cannot be read.
        """
        whole = self.index
        chunks: dict[str, list[Chunk]] = {}
        objects = {}
        for _, name, chunk in self.items(file):
            if chunk is None:
                objects[name] = whole.objects[name]
            else:
                chunks.setdefault(name, []).append(chunk)
        tensors = {name: replace(whole.tensors[name], chunks=tuple(found)) for name, found in chunks.items()}
        return replace(whole, tensors=tensors, objects=objects, files={file: FileEntry(file, size_bytes)})

    def _parse(self) -> Index:
        where = str(self._root / METADATA)
        if self._metadata is None:
            raise DamagedError(f"{where}: the index is not there, or cannot be read")
        table = parse_table(self._metadata, where)
        return Index("dcp", str(self._root), table.tensors, table.objects, files={}, roles={})


def _bytes_of(path: Path) -> bytes | None:
    """All bytes of a staged file, or None."""
    try:
        return path.read_bytes()
    except OSError:
        return None
