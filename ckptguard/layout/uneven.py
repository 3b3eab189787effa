"""Tensor parallel cuts into parts of unequal size: units that are never cut, dealt out among ranks. Pure.

A unit is what has to stay on one rank: a query group with its heads, a Mamba group with its heads, a column of an MLP, a row of
a vocabulary. Ranks get neighbouring units in order, the first ones one more where they do not divide. Where they do, that is
the cut of Megatron Core (``divide`` in megatron/core/utils.py, 0.19.2), and of its nonuniform tensor parallelism for the ranks
of a reduced replica (``ntp_map`` in megatron/core/distributed/nonuniform_tp.py, Megatron-LM pull request 4585).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from ckptguard.core.errors import UsageError

Range = tuple[int, int]
"""Half-open."""


@dataclass(frozen=True, slots=True)
class Units:
    """What a tensor's dim consists of.

    Attributes:
        name: In the plural, for messages.
        count: How many there are.
    """

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks of a replica along one axis, TP or ETP.

    Attributes:
        size: Ranks of this replica.
        full: Ranks of a replica that lost none, which Megatron cuts evenly.
    """

    size: int
    full: int


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a replica is cut.

    Attributes:
        dense: Ranks for dense parameters.
        expert: Ranks for those of experts.
        parts: (pattern of global names, degree) of parts of the model with a degree of their own; of several that match a
            name, the last one counts.
    """

    dense: Axis
    expert: Axis
    parts: tuple[tuple[str, int], ...] = ()

    def part_of(self, name: str) -> int | None:
        """The number of the part that a tensor belongs to; None for the rest of the model."""
        found = [number for number, (pattern, _) in enumerate(self.parts) if fnmatchcase(name, pattern)]
        return found[-1] if found else None


def deal(units: int, ranks: int) -> tuple[Range, ...]:
    """The units of each rank: neighbours, all once, the first ``units % ranks`` ranks one more than the others.

    Raises:
        ValueError: Fewer units than ranks: some would get none.
    """
    if not 0 < ranks <= units:
        raise ValueError(f"{units} units for {ranks} ranks")
    each, more = divmod(units, ranks)
    begins = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return tuple(pairwise(begins))


def cut(extent: int, units: int, ranks: int) -> tuple[Range, ...]:
    """The elements of each rank, where a dim of ``extent`` elements is so many units of equal size.

    Raises:
        ValueError: The units do not divide the extent, or are fewer than the ranks.
    """
    if units < 1 or extent % units:
        raise ValueError(f"{extent} elements are not {units} units")
    size = extent // units
    return tuple((begin * size, end * size) for begin, end in deal(units, ranks))


def place(rank: int, size: int, degree: int) -> tuple[int, int] | None:
    """(copy, place in it) of a rank, where each ``degree`` neighbouring ranks of ``size`` hold a whole copy of a part.

    None for the ranks that are left over: they hold nothing of the part.
    """
    return divmod(rank, degree) if rank < size // degree * degree else None


def parse_replicas(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(data parallel replica, degree) from ``1=6``.

    Raises:
        UsageError: Not of this form, or a replica is named twice.
    """
    out: dict[int, int] = {}
    for text in texts:
        replica, degree = _split(text, "--replica-tp", "REPLICA=TP, such as 1=6")
        if not replica.isdecimal():
            raise UsageError(
                f"--replica-tp {text}: {replica!r} is no number of a data parallel replica; they count from 0"
            )
        if int(replica) in out:
            raise UsageError(f"--replica-tp {text}: replica {int(replica)} is named twice")
        out[int(replica)] = degree
    return tuple(out.items())


def parse_parts(texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """(pattern, degree) from ``decoder.layers.*.mlp.*=4``.

    Raises:
        UsageError: Not of this form.
    """
    return tuple(_split(text, "--tp-for", "PATTERN=TP, such as 'decoder.layers.*.mlp.*=4'") for text in texts)


def _split(text: str, option: str, form: str) -> tuple[str, int]:
    before, _, degree = text.rpartition("=")
    if not before or not degree.isdecimal() or not int(degree):
        raise UsageError(f"{option} {text}: not of the form {form}")
    return before.strip(), int(degree)
