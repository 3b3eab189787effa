"""Layout pairs for ``ckptguard reshard``, and comparisons of what it writes with what Megatron writes itself.

A recipe of a pair can be followed in four forms (:func:`form`): either form of optimizer state, and with the files shared out
among data parallel ranks, as is Megatron's default, or every chunk in the file of its main replica, as resharding writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptguard.core.index import Chunk, TensorEntry
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.megatron.buckets import Ranges, unused_ranges
from ckptguard.testing.recipes import OptimizerFormat, Recipe

FORMS: tuple[OptimizerFormat, OptimizerFormat] = ("fully_reshardable", "dp_reshardable")
ASIDE = ("common_state", "rng_state/", "rerun_state_machine_state/")
"""Objects of the run and not of the model; what a resharding does with them is another matter."""

_PLAIN_FILES = "--no-ckpt-fully-parallel-save"
_LAYOUT = "--pipeline-model-parallel-layout"
_LEFT_OUT = "--untie-embeddings-and-output-weights"

Item = tuple[str, str]
Gaps = Callable[[Checkpoint], Mapping[str, Ranges]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two layouts of one model. States come from ``before``; nothing is trained anew under ``after``."""

    name: str
    before: Recipe
    after: Recipe


def _pair(name: str, before: Recipe, **after: object) -> Pair:
    layout: dict[str, object] = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": None, "vpp": 1}
    layout |= {"first_stage_layers": None, "last_stage_layers": None}
    other: Recipe = replace(before, **(layout | after))  # type: ignore[arg-type]
    return Pair(name, replace(before, name=f"{name}_before"), replace(other, name=f"{name}_after"))


_DENSE = Recipe(name="")
_MOE = Recipe(name="", model="moe")
_BIASES = ("--normalization", "LayerNorm", "--add-qkv-bias", "--position-embedding-type", "learned_absolute")
_GATHERED = (
    "--moe-token-dispatcher-type",
    "allgather",
)  # with the other one experts' TP gathers unequal parts: gloo does not

PAIRS: dict[str, Pair] = {
    pair.name: pair
    for pair in (
        _pair("dense_tp2pp2_to_pp4", replace(_DENSE, tp=2, pp=2), pp=4),
        _pair("dense_tp1_to_tp2pp2vpp2", _DENSE, tp=2, pp=2, vpp=2),
        _pair(
            "dense_uneven", replace(_DENSE, pp=2, num_layers=6, first_stage_layers=1), pp=4, first_stage_layers=1,
            last_stage_layers=1,
        ),
        _pair("dense_pp2_to_tp4", replace(_DENSE, pp=2), tp=4),
        _pair("dense_tp2_to_stages", replace(_DENSE, tp=2), pp=2, extra_flags=(_LAYOUT, "Et|t|tt|L")),
        _pair("dense_dp1_to_dp2", _DENSE, dp=2),
        _pair("moe_ep2pp2_to_tp2ep2", replace(_MOE, pp=2, dp=2, ep=2), tp=2, ep=2, etp=1),
        _pair("moe_ep1_to_ep4", _MOE, dp=4, ep=4),
        _pair("moe_etp2_to_etp1", replace(_MOE, tp=2, dp=2, ep=2, extra_flags=_GATHERED), tp=2, dp=2, ep=2, etp=1),
        _pair("tied_tp2pp2_to_pp2", replace(_DENSE, tp=2, pp=2, without_flags=(_LEFT_OUT,)), pp=2),
        _pair("hybrid_tp2_to_tp1", Recipe(name="", model="hybrid", tp=2)),
        _pair(
            "fp16_tp2dp2_to_pp2dp2", replace(_DENSE, tp=2, dp=2, dtype="fp16", extra_flags=("--initial-loss-scale", "4096")),
            pp=2, dp=2,
        ),
        _pair("fp32_tp2_to_pp2dp2", replace(_DENSE, tp=2, dtype="fp32"), pp=2, dp=2),
        _pair("biases_tp2pp2_to_pp2", replace(_DENSE, tp=2, pp=2, extra_flags=_BIASES), pp=2),
    )
}  # fmt: skip
"""At most four processes each."""


def form(recipe: Recipe, optimizer: OptimizerFormat, *, shared_out: bool = True) -> Recipe:
    """A recipe whose checkpoint has the given optimizer form; ``shared_out``: files as Megatron's default shares them out."""
    flags = recipe.extra_flags if shared_out else (*recipe.extra_flags, _PLAIN_FILES)
    name = f"{recipe.name}_{optimizer.partition('_')[0]}{'' if shared_out else '_plain'}"
    return replace(recipe, name=name, optimizer_format=optimizer, extra_flags=flags)


def reshard_flags(recipe: Recipe, optimizer: OptimizerFormat) -> list[str]:
    """Options of ``ckptguard reshard`` that lead to a recipe's layout, without files that only older releases read."""
    etp = recipe.tp if recipe.etp is None else recipe.etp
    sizes = {"tp": recipe.tp, "pp": recipe.pp, "dp": recipe.dp, "ep": recipe.ep, "etp": etp}
    if _LAYOUT in recipe.extra_flags:
        sizes["pp-layout"] = recipe.extra_flags[recipe.extra_flags.index(_LAYOUT) + 1]  # type: ignore[assignment]
    elif recipe.vpp > 1:
        sizes["vpp"] = recipe.vpp
    ends = {"first-pp-layers": recipe.first_stage_layers, "last-pp-layers": recipe.last_stage_layers}
    sizes |= {name: layers for name, layers in ends.items() if layers is not None}
    return [part for name, size in sizes.items() for part in (f"--{name}", str(size))] + [
        "--optimizer",
        optimizer,
        "--target-version",
        "0.19",
    ]


def other_files(ours: Path, megatrons: Path) -> list[str]:
    """How the files of two checkpoints differ: which there are, what each holds, in which order; nothing of what it says."""
    with open_checkpoint(ours) as one, open_checkpoint(megatrons) as other:
        a, b = _files(one), _files(other)
    out = [f"{name}: only in {ours if name in a else megatrons}" for name in sorted(a.keys() ^ b.keys())]
    for name in sorted(a.keys() & b.keys()):
        if a[name] == b[name]:
            continue
        if sorted(a[name]) == sorted(b[name]):
            at = next(n for n, (x, y) in enumerate(zip(a[name], b[name], strict=True)) if x != y)
            out.append(f"{name}: another order from item {at} on: {a[name][at]} and {b[name][at]}")
        else:
            only = sorted(set(a[name]) ^ set(b[name]))
            out.append(f"{name}: {len(only)} items are in one only, such as {only[0]}")
    return out


def _files(checkpoint: Checkpoint) -> dict[str, list[Item]]:
    """(name, box) of everything in each file, in the order of their bytes."""
    index = checkpoint.index
    items = [(c.span.file, c.span.offset_bytes, (e.name, str(c.box))) for e in index.tensors.values() for c in e.chunks]
    items += [
        (o.span.file, o.span.offset_bytes, (o.name, "")) for o in index.objects.values() if not o.name.startswith(ASIDE)
    ]
    out: dict[str, list[Item]] = {}
    for file, _, item in sorted(items):
        out.setdefault(file, []).append(item)
    return out


def other_bytes(ours: Path, megatrons: Path, *, gaps: Gaps = lambda c: unused_ranges(c.index)) -> list[str]:
    """How the chunks of two checkpoints differ, wherever they stand: their grid, dtypes and elements, bit for bit.

    What stands between the parameters of a bucket is left out: Megatron writes uninitialised memory there.

    Args:
        ours: A checkpoint.
        megatrons: Another one.
        gaps: What a bucket has beside parameters.
    """
    with open_checkpoint(ours) as one, open_checkpoint(megatrons) as other:
        a, b, unused = dict(_chunks(one)), dict(_chunks(other)), gaps(other)
        out = [f"{item}: only in {ours if item in a else megatrons}" for item in sorted(a.keys() ^ b.keys())]
        for item in sorted(a.keys() & b.keys()):
            (entry, chunk), (other_entry, other_chunk) = a[item], b[item]
            if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
                out.append(f"{item[0]}: {entry.dtype} {entry.shape} and {other_entry.dtype} {other_entry.shape}")
                continue
            x, y = _read(one, entry, chunk), _read(other, other_entry, other_chunk)
            for low, high in unused.get(entry.name, ()):
                first = chunk.box.offset[0]
                cut = slice(*(max(0, end - first) * entry.dtype.itemsize for end in (low, high)))
                x[cut] = y[cut] = bytes(len(x[cut]))
            out += [f"{item}: other elements"] if x != y else []
    return out


def _chunks(checkpoint: Checkpoint) -> Iterator[tuple[Item, tuple[TensorEntry, Chunk]]]:
    for entry in checkpoint.index.tensors.values():
        for chunk in entry.chunks:
            yield (entry.name, str(chunk.box)), (entry, chunk)


def _read(checkpoint: Checkpoint, entry: TensorEntry, chunk: Chunk) -> bytearray:
    out = bytearray(chunk.box.numel * entry.dtype.itemsize)
    checkpoint.reader.read_elements(checkpoint.reader.locate(entry, chunk), 0, memoryview(out))
    return out


def other_objects(ours: Path, megatrons: Path) -> list[str]:
    """Which objects of the model and the optimizer have other values; those ``ASIDE`` are left out."""
    with open_checkpoint(ours) as one, open_checkpoint(megatrons) as other:
        names = [name for name in one.index.objects if name in other.index.objects and not name.startswith(ASIDE)]
        a, b = ({n: repr(c.reader.object_value(c.index.objects[n])) for n in names} for c in (one, other))
    return [f"{name}: {a[name]} and {b[name]}" for name in names if a[name] != b[name]]
