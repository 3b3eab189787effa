"""Fingerprints as a JSON file that is kept beside the run, and read again by ``verify --against``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.fingerprint.roots import root
from ckptguard.fingerprint.values import ALGORITHM, Fingerprint

FORMAT = "ckptguard-fingerprints/1"


def roots_of(prints: Mapping[str, Fingerprint], kind_of: Callable[[str], str]) -> dict[str, str]:
    """The root over all tensors ("whole") and over each kind ("weights", "masters", ...), kinds in order of appearance."""
    kinds: dict[str, dict[str, Fingerprint]] = {}
    for name, value in prints.items():
        kinds.setdefault(kind_of(name), {})[name] = value
    return {"whole": root(prints), **{kind: root(items) for kind, items in kinds.items()}}


def as_dict(prints: Mapping[str, Fingerprint], roots: Mapping[str, str], location: str) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "format": FORMAT,
        "algorithm": ALGORITHM,
        "location": location,
        "roots": dict(roots),
        "tensors": {name: [f.dtype, list(f.shape), f.hex] for name, f in prints.items()},
    }


def from_dict(value: Mapping[str, Any], where: str) -> dict[str, Fingerprint]:
    """Reads what ``as_dict`` made, and checks it against its own root.

    Raises:
        DamagedError: It is not whole.
        UnsupportedError: Another format or algorithm.
    """
    if value.get("format") != FORMAT or value.get("algorithm") != ALGORITHM:
        found = f"{value.get('format')!r} with {value.get('algorithm')!r}"
        raise UnsupportedError(f"{where}: {found}; this ckptguard compares {FORMAT} with {ALGORITHM}")
    try:
        prints = {
            name: Fingerprint(dtype, tuple(shape), (int(text[:16], 16), int(text[16:], 16)))
            for name, (dtype, shape, text) in value["tensors"].items()
        }
        kept = value["roots"]["whole"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{where}: not a whole fingerprint file ({error})") from error
    if root(prints) != kept:
        raise DamagedError(f"{where}: its tensors have the root {root(prints)}, it says {kept}")
    return prints
