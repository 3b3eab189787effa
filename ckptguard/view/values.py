"""What the nodes of a job tell each other about a checkpoint, and what they agree on. Frozen values.

A **place** is where a node looks: place 0 is CKPT_DIR, the others are the ``--source`` paths and URLs, in order. Files are
known by their **name**: where they stand in the view, relative to its root (``iter_0000020/__0_0.distcp``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Kind = Literal["global", "local"]
"""``global``: a distributed checkpoint whose ``.metadata`` says what each file holds (torch_dist, torch_dcp, fsdp_dtensor);
``local``: one file per rank, written by nvidia-resiliency-ext's LocalCheckpointManager."""


@dataclass(frozen=True, slots=True)
class Step:
    """A saved state that nodes can agree on.

    Attributes:
        kind: How it is stored.
        number: The iteration in decimal, without leading zeros, or ``release``.
        save: Which save: BLAKE3 of ``.metadata`` (it carries a random id of the save: torch/distributed/checkpoint/
            filesystem.py ``StorageMeta.save_id``, 2.14), or the session of a local one. "" on a node that cannot say.
    """

    kind: Kind
    number: str
    save: str = ""

    @property
    def iteration(self) -> int:
        """For ordering: a release has no iteration and comes before all."""
        return int(self.number) if self.number.isdigit() else -1

    @property
    def folder(self) -> str:
        """Directory of a global step (megatron/training/checkpointing.py ``get_checkpoint_name``, megatron-core 0.19.2)."""
        return f"iter_{self.iteration:07d}" if self.number.isdigit() else self.number

    @property
    def title(self) -> str:
        """For people."""
        text = f"iteration {self.number}" if self.number.isdigit() else self.number
        return f"{text} (local, one file per rank)" if self.kind == "local" else text


@dataclass(frozen=True, slots=True)
class Copy:
    """A file of a step as one node sees it.

    Attributes:
        node: Which node.
        place: Which of its places.
        path: Relative to the place, POSIX.
        name: In the view.
        size_bytes: As listed.
        blake3: Digest of all bytes, hexadecimal, of small files (index, trackers, configs); "" for data files.
    """

    node: int
    place: int
    path: str
    name: str
    size_bytes: int
    blake3: str = ""


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step as one node sees it in one place.

    Attributes:
        step: Which; ``save`` is "" where ``.metadata`` is not there or cannot be read.
        node: Which node.
        place: Which of its places.
        copies: Files that are there. Half-written ones (``*.dirty``, ``*.partial*``, temporary names) are left out and told.
        expected: Bytes that each data file must have at least, as ``.metadata`` of this place says, by name; empty without.
        common: Names of the data files that every rank reads whatever the layout (common state), by what ``.metadata`` says.
        problems: What is wrong with it here, in sentences that name the file.
    """

    step: Step
    node: int
    place: int
    copies: tuple[Copy, ...]
    expected: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    common: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node found on its own.

    Attributes:
        node: Number of the node, from 0.
        host: Its name, for messages.
        places: Its places, as the user gave them; then an earlier version of the view, if there is one.
        url: Where its server answers, without the token; "" where none was started.
        trackers: What each tracker file says, by its path relative to the place: ``0:latest_checkpointed_iteration.txt``.
        found: Steps, newest first.
        notes: What people should know: waits for a network file system, a place that is empty or not there.
        free_bytes: Free where the view is to stand.
        earlier: Number of the place that is an earlier version of the view; None without.
        sees: Nodes whose probe this node finds beside the view: more than its own where the view's directory is shared.
    """

    node: int
    host: str
    places: tuple[str, ...]
    url: str = ""
    trackers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    found: tuple[FoundStep, ...] = ()
    notes: tuple[str, ...] = ()
    free_bytes: int = 0
    earlier: int | None = None
    sees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Needs:
    """Which files the nodes will read.

    Attributes:
        names: Per node, names of data files; common state included.
        how: How they are known, for people: "the load plan of TP2 PP2 ..." or "all files: the ranks are not known".
    """

    names: Mapping[int, tuple[str, ...]]
    how: str


@dataclass(frozen=True, slots=True)
class Digest:
    """What the bytes of a file are.

    Attributes:
        size_bytes: Its size.
        blake3: BLAKE3 of all bytes, hexadecimal.
        block_bytes: Size of a block; 0 where the blocks were not digested (small files).
        blocks: XXH3-64 of every block, 8 little-endian bytes each, hexadecimal.
    """

    size_bytes: int
    blake3: str
    block_bytes: int = 0
    blocks: str = ""

    @property
    def is_known(self) -> bool:
        """False where a file is brought before anybody can say what its bytes should be: it is checked once it is there."""
        return bool(self.blake3)


@dataclass(frozen=True, slots=True)
class Checked:
    """What looking into a copy showed.

    Attributes:
        copy: Which copy.
        fast: Fast digest: XXH3-128 of its size, first and last 64 KiB, hexadecimal. The end of a file written by torch holds
            its last tensors' CRCs, so copies of two saves differ in it. "" if it cannot be read.
        digest: Of all bytes, where that was asked for and the copy is sound.
        problems: What is wrong with it, in sentences that name file, tensor, and box where known. Empty: sound.
    """

    copy: Copy
    fast: str = ""
    digest: Digest | None = None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """One file that a node gets into its staging directory.

    Attributes:
        name: In the view.
        node: Who gets it.
        digest: What it must be when it is there; without BLAKE3 and blocks where only its size is known before it has come.
        copy: The copy at the origin. Where ``copy.node`` is ``node`` it is read there: linked, cloned, copied or downloaded.
        via: The node whose server gives it, if not ``node`` itself: the origin, or a node that is given it too and serves
            what has come already, so that a byte leaves each node once. None: no server.
        afresh: What an earlier attempt left of it is bad. Only where the digest is not known: else that shows by itself.
    """

    name: str
    node: int
    digest: Digest
    copy: Copy
    via: int | None = None
    afresh: bool = False


@dataclass(frozen=True, slots=True)
class Delivered:
    """How a delivery ended.

    Attributes:
        name: In the view.
        how: ``linked``, ``cloned``, ``copied``, ``downloaded`` (from a URL), ``fetched`` (from a node) or ``kept`` (an earlier
            attempt had it); "" if it failed.
        moved_bytes: Bytes that were read from a disk, a store or a node and written here.
        problem: What failed, in a sentence; "" if nothing did.
        unreachable: It failed for want of a connection, not for what the file is.
    """

    name: str
    how: str
    moved_bytes: int = 0
    problem: str = ""
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the nodes agreed on: the record kept in every view as ``ckptguard-view.json``.

    Attributes:
        id: Random, hexadecimal; the same on all nodes.
        step: What the view holds.
        nodes: How many nodes.
        hosts: Their names.
        made: When, ISO 8601 in UTC, by the clock of node 0.
        how: How the needed files are known.
        passed_over: Newer steps that were not taken, and why, in sentences.
        files: Per name, digest of what was staged on any node.
        origins: Per node and name, how and whence it came: ``linked from /ckpt``, ``fetched from node 0 (hostname)``.
        places: Where node 0 looked: CKPT_DIR and the sources.
    """

    id: str
    step: Step
    nodes: int
    hosts: tuple[str, ...]
    made: str
    how: str
    passed_over: tuple[str, ...] = ()
    files: Mapping[str, Digest] = field(default_factory=lambda: MappingProxyType({}))
    origins: Mapping[int, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    places: tuple[str, ...] = ()
