"""What two others see of a run that is verified: Megatron's CI, which compares losses, and ``torch.hash_tensor``.

Both look at the same processes as the recorder: losses are in its streams already, hashes are written beside them, of the same
items at the same events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ckptguard.resume.records import Kind, RankRecord

LOSS_DECIMALS = 5  # of Megatron-LM's functional tests
_LOSS = "loss lm loss"
Hashes = Mapping[int, Mapping[tuple[Kind, int], Mapping[str, int | None]]]


def hash_items(recorder: Any) -> None:
    """Has ``torch.hash_tensor`` of every tensor item written beside this rank's stream."""
    folder = Path(recorder.order.folder)

    def observe(kind: Kind, step: int, items: Any) -> None:
        with torch.no_grad():
            hashes = {item.name: _hash(value) for item in items if isinstance(value := item.read(), torch.Tensor)}
        with (folder / f"hash_tensor_{recorder.rank}.jsonl").open("a") as file:
            file.write(json.dumps([kind, step, hashes]) + "\n")

    recorder.observers.append(observe)


def _hash(tensor: torch.Tensor) -> int | None:
    """The hash; None where torch has none, as for fp8."""
    try:
        return int(torch.hash_tensor(tensor.detach()).item())
    except (RuntimeError, NotImplementedError):
        return None


def read_hashes(folder: Path) -> Hashes:
    """What ``hash_items`` wrote in an arm's folder, by rank and event."""
    out = {}
    for path in sorted(folder.glob("hash_tensor_*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        out[int(path.stem.rpartition("_")[2])] = {(kind, step): hashes for kind, step, hashes in lines}
    return out


def first_other_hash(reference: Hashes, save: Hashes, resumed: Hashes) -> str | None:
    """The first event of a resumed run in which a hash is another one, in words; None if there is none.

    What was loaded is compared with what was saved, steps with those of the reference.
    """
    events = sorted({event for events in resumed.values() for event in events}, key=lambda e: (e[1], e[0] != "loaded"))
    for kind, step in events:
        names = []
        for rank, there in resumed.items():
            right = save[rank].get(("saved", step)) if kind == "loaded" else reference[rank].get((kind, step))
            now = there.get((kind, step))
            if right is not None and now is not None:
                names += [name for name in now.keys() | right.keys() if now.get(name) != right.get(name)]
        if names:
            return f"{'loaded' if kind == 'loaded' else f'step {step}'} ({len(set(names))} tensors)"
    return None


def first_other_loss(reference: Mapping[int, RankRecord], resumed: Mapping[int, RankRecord]) -> str | None:
    """The first step with another loss at five decimals, in words; None if there is none."""
    ours, theirs = _losses(reference), _losses(resumed)
    steps = [step for step in sorted(theirs) if round(ours[step], LOSS_DECIMALS) != round(theirs[step], LOSS_DECIMALS)]
    return f"step {steps[0]}" if steps else None


def _losses(records: Mapping[int, RankRecord]) -> dict[int, float]:
    """Of the last rank that has any: one of the last pipeline stage."""
    out: dict[int, float] = {}
    for record in records.values():
        values = {e.step: e.values[_LOSS] for e in record.events if e.kind == "step" and _LOSS in e.values}
        out = {step: float(str(value).split()[-1]) for step, value in values.items()} or out
    return out
