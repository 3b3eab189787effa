"""docs/supported.md, from the kept results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from supported.results import Result

from ckptguard.testing.families import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported.md"
_HEAD = """\
# Supported architectures

Every architecture that Megatron-Bridge {megatron-bridge} registers, tried by `tools/supported_architectures.py` with
megatron-core {megatron-core} and transformers {transformers}. For each one a small snapshot with random values is imported,
which proves that every tensor of it is in the written files, exported again, and compared bit for bit.
{imported} of {all} architectures are imported.

Bridge's diffusion models (Wan, FLUX, LLaDA, in a package of their own) are not among them and are not imported.
An architecture that is not in the list, or cannot be imported, is refused before anything is written, with the reason.

* **imported**: the parallel sizes of the import. Other sizes work wherever heads, experts and layers allow them.
* **back**: what export gives. `identical`: every tensor, bit for bit. `as bf16`: quantised tensors are
  dequantised on the way in, which is proved, and come back as bf16; all others bit for bit. `but for copies`: what repeats
  another tensor is not written again.
* **names**: where the snapshot's tensor names come from. `suite`: the models of the test suite, with the names and forms of
  released snapshots. `transformers`: transformers' own class, as it saves itself. `Bridge`: there is no such class, so they
  are what Bridge would export: that Bridge's names are the released ones is not tried.
"""


def text(versions: Mapping[str, str], results: Iterable[Result]) -> str:
    """The whole page."""
    results = list(results)
    every = {result.architecture for result in results}
    imported = {result.architecture for result in results if result.imported}
    parts = [_HEAD.format_map({**versions, "imported": len(imported), "all": len(every)})]
    families = [result for result in results if result.case in FAMILIES]
    rest = [result for result in results if result.case not in FAMILIES]
    parts += ["## Imported\n", *_table(sorted((r for r in rest if r.imported), key=_key))]
    parts += ["\n## Imported, in the test suite too\n", *_table((r for r in families if r.imported), family=True)]
    parts += ["\n## Not imported\n", *_refused(sorted((r for r in results if not r.imported), key=_key))]
    return "\n".join(parts) + "\n"


def _key(result: Result) -> str:
    return result.architecture.lower()


def _table(results: Iterable[Result], *, family: bool = False) -> list[str]:
    first = ["family", "architecture"] if family else ["architecture"]
    rows = [[*first, "imported", "back", "names", "to be known"]]
    for result in results:
        begin = [result.case, f"`{result.architecture}`"] if family else [f"`{result.architecture}`"]
        rows.append([*begin, result.layout, result.round_trip, result.names, _cell(result.note)])
    return _lines(rows)


def _refused(results: Iterable[Result]) -> list[str]:
    rows = [["architecture", "why not"]]
    for result in results:
        of_suite = f" ({result.case})" if result.case in FAMILIES else ""
        rows.append([f"`{result.architecture}`{of_suite}", _cell(result.note)])
    return _lines(rows)


def _cell(note: str) -> str:
    return note.replace("|", "\\|")


def _lines(rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
