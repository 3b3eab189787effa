"""What an attempt found, and the file that keeps all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from ckptguard.megatron.bridges import architectures
from ckptguard.testing.families import FAMILIES

FILE = Path(__file__).with_name("results.json")
_PACKAGES = ("megatron-core", "megatron-bridge", "transformers")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one case.

    Attributes:
        case: A family of ``ckptguard.testing.families``, or an architecture.
        architecture: As config.json names it.
        names: Where the snapshot's tensors come from: "suite", "transformers" or "Bridge"; "" if there is none.
        layout: Of the import.
        imported: Whether it was imported, with its proof.
        round_trip: "identical", "but for copies", "as bf16", "no", or "" if it was not imported.
        note: Why not, or what is to be known; one line.
    """

    case: str
    architecture: str
    names: str = ""
    layout: str = ""
    imported: bool = False
    round_trip: str = ""
    note: str = ""


def cases() -> list[str]:
    """Every family of the suite, and every architecture that is in none of them."""
    covered = {family.config["architectures"][0] for family in FAMILIES.values()}
    return [*FAMILIES, *sorted(set(architectures()) - covered)]


def versions() -> dict[str, str]:
    """Of what decides the results."""
    return {name: version(name) for name in _PACKAGES}


def read(file: Path = FILE) -> tuple[dict[str, str], list[Result]]:
    """Versions and results of the last run; nothing if there was none."""
    if not file.is_file():
        return {}, []
    kept = json.loads(file.read_text())
    return kept["versions"], [Result(**item) for item in kept["results"]]


def write(results: Iterable[Result], file: Path = FILE) -> None:
    """Keeps results, in the order of ``cases``."""
    order = {case: number for number, case in enumerate(cases())}
    ordered = sorted((result for result in results if result.case in order), key=lambda result: order[result.case])
    text = json.dumps({"versions": versions(), "results": [asdict(item) for item in ordered]}, indent=1)
    file.write_text(text + "\n")
