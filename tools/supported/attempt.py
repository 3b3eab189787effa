"""One attempt, in a process of its own: snapshot, import with its proof, export, comparison of every tensor.

    python tools/supported/attempt.py CASE DIRECTORY

Prints one JSON object, the fields of ``supported.results.Result`` but for the case.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from supported import snapshots
from supported.own_configs import CAUSES, NOTES

from ckptguard.core.errors import CkptguardError, UnsupportedError
from ckptguard.layout.layouts import Layout

MEMORY_BYTES = 12 << 30
_LONGEST_NOTE = 240


def attempt(case: str, directory: Path) -> dict[str, Any]:
    """Tries a case; the result's fields."""
    out: dict[str, Any] = {
        "architecture": case,
        "names": "",
        "layout": "",
        "imported": False,
        "round_trip": "",
        "note": "",
    }
    try:
        out["names"] = snapshots.make(case, directory / "hf")
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is the finding
        return out | {"note": CAUSES.get(case) or f"no small model: {_words(error)}"}
    config = json.loads((directory / "hf" / "config.json").read_text())
    out["architecture"] = config["architectures"][0]
    try:
        layout, why = _imported(directory, config)
    except CkptguardError as error:
        return out | {"note": CAUSES.get(case) or _words(error)}
    out |= {"imported": True, "layout": _layout_words(layout), "note": why or NOTES.get(case, "")}
    try:
        out |= _exported(directory)
    except CkptguardError as error:
        out |= {"round_trip": "no", "note": f"export: {_words(error)}"}
    return out


def _imported(directory: Path, config: dict[str, Any]) -> tuple[Layout, str]:
    """Imports under the first layout that works; and why not under the one before."""
    from ckptguard.convert.importing import ImportOptions, prepare, run_import
    from ckptguard.formats.registry import open_checkpoint

    why = ""
    tries = _layouts(config)
    with open_checkpoint(directory / "hf") as snapshot:
        for layout in tries:
            options = ImportOptions(layout=layout)
            try:
                prepared = prepare(snapshot, "tiny", options)
                run_import(snapshot, prepared, directory / "megatron", options, what="import")
            except UnsupportedError as error:
                if layout is tries[-1]:
                    raise
                why = why or f"not with {_layout_words(layout)}: {_words(error)}"
                continue
            return layout, why
    raise AssertionError("the last layout is returned or raised")


def _layouts(config: dict[str, Any]) -> list[Layout]:
    """What to try: all axes, one of the two, none."""
    text = next((config[n] for n in ("text_config", "thinker_config", "llm_config") if n in config), config)
    text = text.get("text_config", text)
    layers = int(text.get("num_hidden_layers") or 4)
    experts = any(text.get(n) for n in ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"))
    first = {"ep": 2, "etp": 1} if experts else {}
    if layers % 2:
        first |= {"first_pp_layers": layers // 2, "last_pp_layers": layers - layers // 2}
    return [Layout(tp=2, pp=2, **first), Layout(tp=2), Layout(pp=2), Layout()]


def _layout_words(layout: Layout) -> str:
    axes = {"TP": layout.tp, "PP": layout.pp, "EP": layout.ep}
    return " ".join(f"{name}{size}" for name, size in axes.items() if size > 1 or name == "TP")


def _exported(directory: Path) -> dict[str, str]:
    """Exports in the form of the snapshot, and compares; {"round_trip", perhaps "note"}."""
    from ckptguard.convert.exporting import ExportOptions, prepare_export, run_export
    from ckptguard.formats.registry import open_checkpoint

    options = ExportOptions()
    with open_checkpoint(directory / "megatron") as stored:
        prepared = prepare_export(stored, str(directory / "hf"), options)
        run_export(stored, prepared, directory / "back", options, what="export")
    before, after = _tensors(directory / "hf"), _tensors(directory / "back")
    gone, new = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    if any(name.endswith(("_scale_inv", "_blocks", "_scales")) for name in gone):
        before = {name: tensor for name, tensor in before.items() if name in after and after[name][0] == tensor[0]}
        gone, new, form = [], [], "as bf16"
    else:
        form = "identical"
    wrong = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    if wrong or new:
        return {"round_trip": "no", "note": f"{len(wrong)} tensors differ, {len(new)} are new: {(wrong + new)[0]}"}
    if gone:
        return {"round_trip": "but for copies", "note": f"not written again: {', '.join(gone[:3])}"}
    return {"round_trip": form}


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of every tensor of a snapshot."""
    import torch
    from safetensors import safe_open

    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                out[name] = str(tensor.dtype), tuple(tensor.shape), data
    return out


def _words(error: BaseException) -> str:
    """One line of an error's message, cut where it becomes a list."""
    message = error.message if isinstance(error, CkptguardError) else f"{type(error).__name__}: {error}"
    line = " ".join(message.split())
    return line if len(line) <= _LONGEST_NOTE else line[:_LONGEST_NOTE].rpartition(" ")[0].rstrip(";,:") + " ..."


@contextlib.contextmanager
def _only_answer_on_stdout() -> Iterator[Any]:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        yield answer


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with _only_answer_on_stdout() as answer:
        json.dump(attempt(sys.argv[1], Path(sys.argv[2])), answer)
