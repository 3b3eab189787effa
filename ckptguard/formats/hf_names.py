"""The files of a Hugging Face snapshot by name: the index, the numbering of shards, and which files belong to it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from ckptguard.core.errors import DamagedError
from ckptguard.core.problems import Problem
from ckptguard.formats.storage import Directory

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FileKind = Literal["missing-file", "unreadable"]

_NUMBERED = re.compile(r"(?P<head>.+-)(?P<number>\d{1,9})(?P<tail>-of-(?P<count>\d{1,9})\.safetensors)")
_RANKED = re.compile(r"shard-(?P<rank>\d{1,9})-(?P<rest>.+-\d{1,9}-of-\d{1,9}\.safetensors)")
_LISTED = 100  # a name may claim any number of files; this many holes are listed one by one


@dataclass(frozen=True, slots=True)
class WeightMap:
    """An index file.

    Attributes:
        name: Its own name.
        files: Tensor name -> file that holds it.
        total_size: Bytes of all tensors, as it says.
    """

    name: str
    files: dict[str, str]
    total_size: int | None

    def by_file(self) -> dict[str, list[str]]:
        """File -> tensors that it should hold, sorted by file."""
        out: dict[str, list[str]] = {}
        for tensor, file in self.files.items():
            out.setdefault(file, []).append(tensor)
        return dict(sorted(out.items()))


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parses a JSON object in which no name stands twice. Raises ValueError for anything else."""
    try:
        value = json.loads(text, object_pairs_hook=_no_twins)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except TypeError:
        raise ValueError(f"a {type(text).__name__}, expected text") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, expected an object")
    return value


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twin, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twin} stands in it twice")
    return table


def read_weight_map(files: Directory, problems: list[Problem]) -> WeightMap | None:
    """Reads the index, if there is one; what is wrong with it is noted and the headers then speak alone."""
    found = [name for name in files.listing if name.endswith(INDEX_SUFFIX) and "/" not in name]
    name = INDEX if INDEX in found else found[0] if len(found) == 1 else None
    others = (other for other in found if other != name)
    problems += [Problem("note", f"{other}: another index; it is not read", file=other) for other in others]
    if name is None:
        return None
    try:
        value = parse_object(files.read(name))
        table = value.get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise ValueError("it has no weight_map from tensor names to file names")
    except ValueError as error:
        problems.append(Problem("unreadable", f"{name}: not a usable index: {error}", file=name))
        return None
    except DamagedError as error:
        problems.extend(error.problems or [Problem("unreadable", error.message, file=name)])
        return None
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    kept = {}
    for tensor, file in table.items():
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts:
            message = f"{name}: says that {tensor} is in {file}, which leads out of the snapshot"
            problems.append(Problem("escape", message, file=name, tensor=tensor))
        else:
            kept[tensor] = str(path)
    # Some writers store the size as a float; it is exact up to 2^53 bytes.
    return WeightMap(name, kept, int(total) if isinstance(total, int | float) and total == total // 1 else None)


def choose(names: list[str], index: WeightMap | None, problems: list[Problem]) -> list[str]:
    """Which safetensors files make up the snapshot; the others are named in a note, so that none is skipped silently.

    With an index, those that it names, and others of the same numbering (they belong to it, so not to name them is a
    problem). Without one, ``model.safetensors`` if it is there, as in transformers, else all of them.
    """
    if index is None:
        chosen = [SINGLE] if SINGLE in names else names
        if len(chosen) > 1 and any(_NUMBERED.fullmatch(n) and not is_rank_file(n) for n in chosen):
            message = f"{len(chosen)} files without {INDEX}, which most loaders need: only the headers say what is here"
            problems.append(Problem("note", message))
    else:
        named = set(index.files.values())
        families = {family for name in named if (family := _family(name))}
        related = [n for n in names if n not in named and _family(n) in families]
        for name in related:
            message = f"{name}: {index.name} does not name it, though it does the others of its numbering"
            problems.append(Problem("extra-file", message, file=name))
        if SINGLE in names and SINGLE not in named:
            # transformers takes model.safetensors, vLLM what the index names: no reader can be right for both.
            message = f"{SINGLE} is here, and an index that does not name it; loaders differ on which of them they take"
            problems.append(Problem("extra-file", message, file=SINGLE))
        chosen = sorted({*named, *related})
    for name in sorted(set(names).difference(chosen)):
        if index is None or name != SINGLE:
            message = f"{name}: not part of the model that this directory holds; it is not read"
            problems.append(Problem("note", message, file=name))
    return chosen


def _family(name: str) -> tuple[str, str] | None:
    match = _NUMBERED.fullmatch(name)
    return (match["head"], match["tail"]) if match else None


def is_rank_file(name: str) -> bool:
    """Whether the name is one of torch's ``save_distributed`` shards."""
    return _RANKED.fullmatch(name) is not None


def part_of_more(names: Iterable[str]) -> list[Problem]:
    """A note for a single file whose name says that there are others."""
    return [
        Problem("note", f"{name}: one file of several; the others are not looked at", file=name)
        for name in names
        if ((match := _NUMBERED.fullmatch(name)) and int(match["count"]) > 1) or is_rank_file(name)
    ]


def holes(names: Iterable[str], index: WeightMap | None) -> list[Problem]:
    """Files that the numbering of the others says must be there. Those that the index names are reported with it."""
    present = {*names, *(index.files.values() if index else ())}
    return [*_missing_numbers(present), *_missing_ranks(present)]


def _missing_numbers(present: set[str]) -> Iterator[Problem]:
    """``-K-of-N``: each K from 1 to N. Rank files need each K on some rank only: a rank writes just what it owns."""
    families: dict[tuple[str, str], tuple[int, set[int], int]] = {}
    for name in present:
        ranked = _RANKED.fullmatch(name)
        match = _NUMBERED.fullmatch(ranked["rest"] if ranked else name)
        if match:
            key = ("shard-*-" * bool(ranked) + match["head"], match["tail"])
            count, numbers, width = families.setdefault(key, (int(match["count"]), set(), len(match["number"])))
            numbers.add(int(match["number"]))
    for (head, tail), (count, numbers, width) in sorted(families.items()):
        said = f"the names of the others say that there are {count}"
        yield from _listed((f"{head}{n:0{width}d}{tail}" for n in _gaps(numbers, count)), said, count - len(numbers))


def _missing_ranks(present: set[str]) -> Iterator[Problem]:
    """Rank numbers run from 1 without holes. A rank that owns nothing writes no file either, so the message says so."""
    matches = [match for name in present if (match := _RANKED.fullmatch(name))]
    ranks = {int(match["rank"]) for match in matches}
    if ranks:
        last, width = max(ranks), len(matches[0]["rank"])
        said = f"there are files of ranks up to {last}, none of this one (or it had nothing to save)"
        yield from _listed((f"shard-{n:0{width}d}-*{SUFFIX}" for n in _gaps(ranks, last)), said, last - len(ranks))


def _gaps(numbers: set[int], last: int) -> Iterator[int]:
    return (n for n in range(1, last + 1) if n not in numbers)


def _listed(missing: Iterator[str], said: str, count: int) -> Iterator[Problem]:
    for number, name in enumerate(missing):
        if number == _LISTED:
            yield Problem("missing-file", f"and {count - _LISTED} files more are missing; {said}")
            return
        yield Problem("missing-file", f"{name} is missing; {said}", file=name)
