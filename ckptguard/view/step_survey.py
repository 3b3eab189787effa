"""One step directory of a distributed checkpoint as one node sees it; data files are listed, and never opened.

What the index ``.metadata`` of this node says is read from ``.metadata`` alone: data files that stand on other nodes are not
needed for it. A data file is one that the index lists, or, where it lists nothing, one called ``*.distcp``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3

from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.core.index import FileEntry
from ckptguard.core.problems import Problem
from ckptguard.core.writing import check_relative
from ckptguard.formats import dcp, facts, torch_dist
from ckptguard.formats.legacy import RANK_FOLDER
from ckptguard.formats.remote import UNFINISHED, directory
from ckptguard.formats.storage import Directory
from ckptguard.view.network_files import is_recent
from ckptguard.view.values import Copy, FoundStep, Step

MOST_DIGESTED_BYTES = 64 << 20
_MOST_SENTENCES = 8
# torch writes .metadata.tmp and renames it (filesystem.py 2.14.1); then ckptguard, editors, download tools, NFS, rsync.
_TEMPORARY = re.compile(r"\.nfs[0-9a-f]+|.*\.(tmp|temp|part|dirty|incomplete)|.*\.partial(-.*)?|\..+\.[A-Za-z0-9]{6}")
# Files that are never empty when they are whole.
_NEVER_EMPTY = frozenset(
    {dcp.METADATA, torch_dist.CONFIG, torch_dist.COMMON, torch_dist.INTEGRITY, facts.RUN_CONFIG, "train_state.pt"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Listed:
    """What an index lists.

    Attributes:
        ends: By data file, relative to the index's directory: the end of its last item, in bytes.
        common: Data files with common state.
        problems: What is wrong with the index itself, in sentences.
    """

    ends: Mapping[str, int]
    common: tuple[str, ...]
    problems: tuple[str, ...] = ()


class Indexes:
    """Indexes by the digest of their bytes: one that stands in several places, or is looked at again, is read once."""

    def __init__(self) -> None:
        self._known: dict[str, Listed] = {}

    def read(self, data: bytes, digest: str, where: str) -> Listed:
        """What an index lists.

        Raises:
            DamagedError: It is not a whole index, or names files outside its directory.
        """
        if digest not in self._known:
            self._known[digest] = _listed(*dcp.stored_items(data, where), where)
        return self._known[digest]


def _listed(items: Sequence[dcp.StoredItem], problems: Sequence[Problem], where: str) -> Listed:
    ends: dict[str, int] = {}
    common: dict[str, None] = {}
    for name, file, offset_bytes, length_bytes in items:
        end = offset_bytes + length_bytes
        if not 0 <= offset_bytes <= end:
            raise DamagedError(f"{where}: {name} stands at byte {offset_bytes}, {length_bytes} bytes long")
        if end > ends.get(file, -1):
            ends[file] = end
        if name.startswith(torch_dist.COMMON_STATE):
            common[file] = None
    for file in ends:
        if not _stays_inside(file):
            raise DamagedError(f"{where}: names the data file {file!r}, which is no name inside its directory")
    return Listed(ends, tuple(common), tuple(problem.message for problem in problems))


def _stays_inside(name: str) -> bool:
    try:
        check_relative(name)
    except ValueError:
        return False
    return "\0" not in name


@dataclass(frozen=True, slots=True)
class StepFolder:
    """Where a step stands.

    Attributes:
        node: Which node looks.
        place: Number of the place.
        root: The place: a local path or a URL.
        path: The directory, relative to the place.
        number: The iteration in decimal, or ``release``.
    """

    node: int
    place: int
    root: Path
    path: str
    number: str

    @property
    def in_view(self) -> str:
        """Name of the directory in the view."""
        return Step("global", self.number).folder


@dataclass(frozen=True, slots=True)
class Look:
    """A step directory as it is now.

    Attributes:
        found: What nodes are told of it.
        doubtful: Files that should be there, or longer, and may not be visible yet; relative to the place.
    """

    found: FoundStep
    doubtful: tuple[str, ...] = ()


def look(folder: StepFolder, indexes: Indexes) -> Look:
    """Looks at a step directory. Whatever is wrong with it is a sentence in ``problems``, never an exception."""
    seen = _Seen(folder, indexes)
    try:
        with dcp.collector_paused(), directory(folder.root / folder.path) as files:
            seen.read(files)
    except (OSError, CkptguardError) as error:
        seen.problems.append(f"{folder.root / folder.path}: {said(error)}")
    return seen.result()


def said(error: OSError | CkptguardError) -> str:
    """An error in a few words."""
    return error.message if isinstance(error, CkptguardError) else f"cannot be read: {error.strerror or error}"


@dataclass(slots=True)
class _Seen:
    """Collects what is seen of a step directory."""

    folder: StepFolder
    indexes: Indexes
    save: str = ""
    copies: list[Copy] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    data: Mapping[str, int] = field(default_factory=dict)  # the part of ``ends`` that the step's own index lists
    common: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)

    def read(self, files: Directory) -> None:
        """Takes everything in.

        Raises:
            OSError, EnvironmentFailedError: It cannot be listed.
        """
        listing, folder = files.listing, self.folder
        path, view = folder.path, folder.in_view
        refused = _refused(files)
        if refused:
            self.problems.append(f"{files.root}: {refused}")
            return
        digests, broken = self._read_indexes(files)
        here = {name: entry for name, entry in listing.items() if name not in broken and self._is_whole(files, entry)}
        for name, entry in here.items():
            digest = digests.get(name) or ("" if name in self.data else self._digest(files, entry))
            if digest is not None:
                found = Copy(folder.node, folder.place, f"{path}/{name}", f"{view}/{name}", entry.size_bytes, digest)
                self.copies.append(found)
        self._compare(files, here)
        if dcp.METADATA not in listing and torch_dist.CONFIG in listing:  # which is written after it
            self.doubtful.append(dcp.METADATA)
        if not listing:
            self.problems.append(f"{files.root}: an empty directory")

    def _read_indexes(self, files: Directory) -> tuple[dict[str, str], set[str]]:
        """(digest by index that was read, indexes that cannot be): the step's own, and those of checkpoints inside it.

        Files of a checkpoint inside the step (``modelopt_state``) are read by every rank, so far as anyone knows.
        """
        digests: dict[str, str] = {}
        broken: set[str] = set()
        for name, entry in files.listing.items():
            below, _, last = name.rpartition("/")
            if last != dcp.METADATA or not entry.inside or entry.size_bytes <= 0:
                continue
            try:
                data = files.read(name)
                digests[name] = blake3(data).hexdigest()
                listed = self.indexes.read(data, digests[name], str(files.root / name))
            except CkptguardError as error:
                broken.add(name)
                self.problems.append(f"{error.message}; it may be half-written")
                if files.local and is_recent(files.root / name):
                    self.doubtful.append(name)
                continue
            prefix = f"{below}/" if below else ""
            self.ends.update((f"{prefix}{file}", end) for file, end in listed.ends.items())
            self.common += [f"{prefix}{file}" for file in (listed.ends if below else listed.common)]
            self.problems += _few(list(listed.problems))
            if not below:
                self.save, self.data = digests[name], listed.ends
        return digests, broken

    def _is_whole(self, files: Directory, entry: FileEntry) -> bool:
        """Whether a file can be a copy; if not, says why."""
        name = entry.path
        if name in self.data and entry.size_bytes > 0 and entry.inside:  # by far the most
            return True
        where = files.root / name
        if _TEMPORARY.fullmatch(name.rpartition("/")[2]):
            self.problems.append(f"{where}: a temporary name: whoever wrote it has not ended")
        elif not entry.inside:
            self.problems.append(
                f"{where}: a symlink that leaves the directory (to {entry.link_target}): give the directory that it leads"
                " to with --source, or copy the file"
            )
        elif entry.size_bytes < 0:
            self.problems.append(f"{where}: a symlink that leads to no file")
        elif entry.size_bytes == 0 and self._never_empty(name):
            self.problems.append(f"{where}: 0 bytes: its writer has not ended, or died, or the disk was full")
            if name not in self.ends:
                self.doubtful += [name] if files.local and is_recent(where) else []
        elif entry.size_bytes == 0 and not where.is_file():
            self.problems.append(f"{where}: not a plain file")
        else:
            return True
        return False

    def _never_empty(self, name: str) -> bool:
        return name.rpartition("/")[2] in _NEVER_EMPTY or name.endswith(".distcp") or self.ends.get(name, 0) > 0

    def _digest(self, files: Directory, entry: FileEntry) -> str | None:
        """BLAKE3 of a small file, "" for one that is not read, None if reading fails."""
        name = entry.path
        data_file = name in self.data or (name.endswith(".distcp") and "/" not in name)
        if data_file or entry.size_bytes > MOST_DIGESTED_BYTES:
            return ""
        try:
            data = files.read(name) if entry.size_bytes else b""
            if name == torch_dist.CONFIG:
                json.loads(data)
        except (CkptguardError, OSError) as error:
            self.problems.append(f"{files.root / name}: {said(error)}")
            return None
        except (ValueError, RecursionError) as error:
            self.problems.append(f"{files.root / name}: not JSON ({error}); it may be half-written")
            self.doubtful += [name] if files.local and is_recent(files.root / name) else []
            return None
        return blake3(data).hexdigest()

    def _compare(self, files: Directory, here: Mapping[str, FileEntry]) -> None:
        """Data files that are shorter than the index says are told; those and missing ones may come yet."""
        short = []
        for name, end in self.ends.items():
            entry = here.get(name)
            if entry is None:
                self.doubtful.append(name)
            elif entry.size_bytes < end:
                short.append(f"{files.root / name}: cut short: {entry.size_bytes} bytes, the index needs {end}")
                self.doubtful += [name] if files.local and is_recent(files.root / name) else []
        self.problems += _few(short)

    def result(self) -> Look:
        """What was seen."""
        folder = self.folder
        view = folder.in_view
        found = FoundStep(
            Step("global", folder.number, self.save),
            folder.node,
            folder.place,
            tuple(self.copies),
            MappingProxyType({f"{view}/{name}": end for name, end in self.ends.items()}),
            tuple(f"{view}/{name}" for name in self.common),
            tuple(self.problems),
        )
        return Look(found, tuple(f"{folder.path}/{name}" for name in self.doubtful))


def _few(sentences: list[str]) -> list[str]:
    more = len(sentences) - _MOST_SENTENCES
    return [*sentences[:_MOST_SENTENCES], f"and {more} more of that kind"] if more > 0 else sentences


def _refused(files: Directory) -> str:
    """Why the files of a step directory are no use for a view; "" if they are."""
    listing = files.listing
    if UNFINISHED in listing:
        return f"unfinished: {UNFINISHED} is there, which the command that writes it removes at the end"
    if dcp.METADATA in listing:
        return ""
    if any(RANK_FOLDER.fullmatch(name.partition("/")[0]) for name in listing):
        return (
            "legacy torch format: every rank reads only its own mp_rank_* file; reshard it to torch_dist first or copy it"
            " whole"
        )
    if "model.safetensors.index.json" in listing or "model.safetensors" in listing:
        return "a Hugging Face snapshot: import it first"
    backend = None
    with suppress(CkptguardError, OSError, ValueError, RecursionError, AttributeError):
        backend = (
            json.loads(files.read(torch_dist.CONFIG)).get("sharded_backend") if torch_dist.CONFIG in listing else None
        )
    if backend not in (None, "torch_dist"):
        return (
            f"{torch_dist.CONFIG} says {backend!r}, only torch_dist can be used; load and save it once with Megatron Core"
            " 0.15 or older and --ckpt-format torch_dist"
        )
    return ""
