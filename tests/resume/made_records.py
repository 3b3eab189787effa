"""Hand-made records of arms that ran the same, and ways to change one value in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ckptguard.core.watching import Group
from ckptguard.resume.records import Event, Kind, RankRecord, Value

Arm = dict[int, RankRecord]
LAYERS = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight", "output_layer.weight")
GENERATORS = ("python", "numpy", "torch cpu", "cuda", "tracker model-parallel-rng", "tracker expert-parallel-rng")


def digest(*seed: object, kind: str = "float32[16, 8]") -> str:
    """The recorded value of a tensor; equal for equal seeds."""
    return f"#{blake2b(repr(seed).encode(), digest_size=16).hexdigest()} {kind}"


def values_of(rank: int, step: int, *, full: bool = True) -> dict[str, tuple[Group, Value]]:
    """A small state after a step; with ``full`` what the step itself made too. The CPU generator is never drawn from."""
    out: dict[str, tuple[Group, Value]] = {"counter iteration": ("counter", step)}
    if full:
        drawn = {name: 0 if name == "torch cpu" else step - 1 for name in GENERATORS}
        out |= {f"rng at begin {n}": ("rng at begin", _generator(rank, n, at)) for n, at in drawn.items()}
        out |= {f"batch {m} tokens": ("batch", digest("batch", 2 * step + m, kind="int64[2, 9]")) for m in range(2)}
        out["loss lm loss"] = ("loss", f"{digest('loss', step, kind='float32[]')} {9 / step}")
        out |= {f"gradient chunk 0 {name}": ("gradient", digest("gradient", name, step)) for name in LAYERS}
        out["metric grad norm"] = ("metric", 3.0 / step)
    out |= {f"master chunk 0 {name}": ("master", digest("master", name, step, rank)) for name in LAYERS}
    for sort in ("exp_avg", "exp_avg_sq"):
        out |= {f"optimizer {sort} chunk 0 {name}": ("optimizer", digest(sort, name, step, rank)) for name in LAYERS}
    out |= {f"parameter chunk 0 {name}": ("parameter", digest("parameter", name, step)) for name in LAYERS}
    out["unsaved buffer chunk 0 decoder.layers.0.mlp.router.ga_steps"] = ("unsaved buffer", digest("ga", step))
    for at in range(2):
        out |= {
            f"param group 0.{at} weight_decay": ("param group", 0.1 * (1 - at)),
            f"param group 0.{at} step": ("param group", step),
            f"param group 0.{at} params": ("param group", [f"chunk 0 {name}" for name in LAYERS[at : at + 2]]),
        }
    out["scheduler num_steps"] = ("scheduler", 8 * step)
    drawn = {name: 0 if name == "torch cpu" else step for name in GENERATORS}
    return out | {f"rng {n}": ("rng", _generator(rank, n, at)) for n, at in drawn.items()}


def _generator(rank: int, name: str, draws: int) -> str:
    if name in ("python", "numpy"):
        return f"#b3:{digest(name, rank, draws)[1:33]}"
    return digest(name, rank, draws, kind="uint8[16]" if name == "cuda" else "uint8[5056]")


def event(kind: Kind, step: int, values: Mapping[str, tuple[Group, Value]], record: RankRecord) -> None:
    """Appends an event."""
    record.groups.update({name: group for name, (group, _) in values.items()})
    record.events.append(Event(kind, step, {name: value for name, (_, value) in values.items()}))


def arm(
    steps: tuple[int, int], *, ranks: int = 2, loaded: bool = False, saved: tuple[int, ...] = (), **facts: Any
) -> Arm:
    """An arm that made steps ``first`` to ``last`` and perhaps loaded before and saved within."""
    out = {}
    for rank in range(ranks):
        record = RankRecord(facts={"rank": rank, "world_size": ranks, **facts}, ended=True)
        if loaded:
            event("loaded", steps[0] - 1, values_of(rank, steps[0] - 1, full=False), record)
        for step in range(steps[0], steps[1] + 1):
            event("step", step, values_of(rank, step), record)
            if step in saved:
                event("saved", step, values_of(rank, step, full=False), record)
        out[rank] = record
    return out


def changed(records: Arm, kind: Kind, step: int, rank: int, item: str, value: Value) -> Arm:
    """A copy of an arm with one value replaced, or added at the end if it was not there."""
    return edited(records, kind, step, rank, lambda values: {**values, item: value})


def edited(records: Arm, kind: Kind, step: int, rank: int, edit: Any) -> Arm:
    """A copy of an arm with the values of one event replaced by what ``edit`` makes of them."""
    record = records[rank]
    events = [
        dataclasses.replace(e, values=edit(dict(e.values))) if (e.kind, e.step) == (kind, step) else e
        for e in record.events
    ]
    assert events != record.events, "nothing was changed"
    return {**records, rank: dataclasses.replace(record, events=events)}


def without(records: Arm, kind: Kind, step: int, rank: int) -> Arm:
    """A copy of an arm that lacks one event."""
    kept = [e for e in records[rank].events if (e.kind, e.step) != (kind, step)]
    return {**records, rank: dataclasses.replace(records[rank], events=kept)}
