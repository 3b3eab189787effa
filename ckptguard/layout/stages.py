"""How layers are cut into pipeline stages, and what Megatron refuses. Pure.

Sources (megatron-core 0.19.2): megatron/core/transformer/transformer_config.py ``__post_init__``, transformer_block.py
``get_num_layers_to_build``, pipeline_parallel_layer_layout.py, megatron/core/models/hybrid/hybrid_layer_allocation.py
``select_pipeline_segment``. Stage ``v * pp + p`` is virtual stage ``v`` of pipeline rank ``p``.

A hybrid model's stages stand in its layer pattern, ``M-|M*``: Megatron calls a pattern without ``|`` deprecated above PP 1,
refuses virtual stages for it, and refuses one with ``|`` for another number of stages or at PP 1. So the pattern is cut anew
for each layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptguard.layout.layouts import Layout

_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_SHOWN = 16


def written_out(pp_layout: str) -> list[str]:
    """The letters of each stage of a ``--pipeline-model-parallel-layout``: ``Et*2|tL`` is ``["Ett", "tL"]``."""
    text = pp_layout.replace(",", "")
    for pattern in _REPEATED:
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text.split("|")


def virtual_stages(layout: Layout, pattern: str | None = None) -> int:
    """Virtual stages per pipeline rank; what a layout string or a pattern says goes before ``vpp``."""
    if layout.pp_layout is None:
        return layout.vpp
    stages = written_out(layout.pp_layout) if pattern is None else _main(layout.pp_layout).split("|")
    return max(1, len(stages) // layout.pp)


def cut_pattern(pattern: str, layout: Layout) -> str:
    """A hybrid layer pattern with its stages marked for a layout that ``wrong_stages`` finds nothing wrong with.

    Args:
        pattern: Layers, ``|`` between the stages of another layout, and after ``/`` the MTP layers, which stay.
        layout: ``pp_layout`` is a pattern too, of the same layers; without it, a pattern that has the stages already is kept.
    """
    main, mtp = _main(pattern), pattern[len(_main(pattern)) :]
    if layout.pp_layout is not None:
        return _main(layout.pp_layout) + mtp
    if layout.pp == 1:
        return main.replace("|", "") + mtp
    if _has_stages(main, layout):
        return pattern
    layers = main.replace("|", "")
    sizes = [n // layout.vpp for n in _per_rank(len(layers), layout)] * layout.vpp
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return "|".join(layers[end - size : end] for end, size in zip(ends, sizes, strict=True)) + mtp


def wrong_stages(layers: int, mtp: int, pattern: str | None, layout: Layout) -> Iterator[str]:
    """Why Megatron cannot cut a model into these stages, a reason each; names values that work.

    Args:
        layers: Layers of the decoder.
        mtp: MTP layers.
        pattern: A hybrid model's layer pattern.
        layout: The layout asked for.
    """
    virtual = virtual_stages(layout, pattern)
    if virtual > 1 and layout.pp == 1:
        yield f"{virtual} virtual stages need --pp above 1"
        return
    if layout.vpp not in (1, virtual):
        yield f"--vpp {layout.vpp} beside a --pp-layout of {virtual} virtual stages (leave --vpp out)"
    if layout.pp_layout is None:
        yield from _wrong_cut(layers, pattern, layout)
        return
    other = _names(layout)
    if other:
        yield f"{' and '.join(other)} beside --pp-layout, which says all (leave them out)"
    if pattern is None:
        yield from _wrong_layout(layers, mtp, layout.pp_layout, layout.pp)
    else:
        yield from _wrong_pattern(_main(pattern).replace("|", ""), _main(layout.pp_layout), layout.pp)


def _main(pattern: str) -> str:
    return pattern.partition("/")[0]


def _has_stages(main: str, layout: Layout) -> bool:
    """Whether a pattern is cut into as many stages as a layout that says no more than their number."""
    ends = layout.first_pp_layers is not None or layout.last_pp_layers is not None
    return "|" in main and not ends and main.count("|") + 1 == layout.pp * layout.vpp


def _names(layout: Layout) -> list[str]:
    given = {
        "--first-pp-layers": layout.first_pp_layers is not None, "--last-pp-layers": layout.last_pp_layers is not None,
        "--count-embedding": layout.count_embedding, "--count-loss": layout.count_loss,
    }  # fmt: skip
    return [name for name, there in given.items() if there]


def _wrong_cut(layers: int, pattern: str | None, layout: Layout) -> Iterator[str]:
    counted = layout.count_embedding + layout.count_loss
    if pattern is not None and counted:
        yield "--count-embedding and --count-loss: a hybrid model's stages hold layers only (leave them out)"
        return
    if pattern is not None and _has_stages(_main(pattern), layout):
        return
    first, last = layout.first_pp_layers, layout.last_pp_layers
    if counted and (first is not None or last is not None):
        yield f"{' and '.join(_names(layout))} together (give either the counts or the layers at the ends)"
        return
    if _cuts(layers + counted, layout.pp, layout.vpp, first, last):
        return
    over = f"--pp {layout.pp}" + (f" --vpp {layout.vpp}" if layout.vpp > 1 else "")
    ends = {"--first-pp-layers": first, "--last-pp-layers": last}
    over += "".join(f" {name} {n}" for name, n in ends.items() if n is not None)
    many = f"{layers} layers" + (f" and {counted} counted as such" if counted else "")
    even = [n for n in range(1, layers + counted + 1) if _cuts(layers + counted, n, layout.vpp, first, last)]
    found = f"these --pp work: {words(even)}"
    if not counted:
        lasts = [n for n in range(1, layers) if _cuts(layers, layout.pp, layout.vpp, first, n)]
        found += f"; these --last-pp-layers: {words(lasts)}"
    yield f"{many} over {over} ({found})"


def _cuts(layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> bool:
    """Whether layers can be cut so. Megatron does not see that ends can be more than all layers, and builds nonsense."""
    ends = [n for n in (first, last) if n is not None]
    rest, stages = layers - sum(ends), pp - len(ends)
    if (vpp > 1 and pp == 1) or rest < 0 or stages < 0 or bool(rest) != bool(stages):
        return False
    return all(n > 0 and n % vpp == 0 for n in ends) and (not stages or rest % (stages * vpp) == 0)


def _per_rank(layers: int, layout: Layout) -> list[int]:
    """Layers of each pipeline rank of a cut that is possible."""
    first, last = layout.first_pp_layers, layout.last_pp_layers
    head, tail = [n for n in (first,) if n is not None], [n for n in (last,) if n is not None]
    stages = layout.pp - len(head) - len(tail)
    middle = [(layers - sum(head) - sum(tail)) // stages] * stages if stages else []
    return head + middle + tail


def _wrong_layout(layers: int, mtp: int, pp_layout: str, pp: int) -> Iterator[str]:
    """``PipelineParallelLayerLayout.validate_layer_layout``."""
    stages = written_out(pp_layout)
    letters = "".join(stages)
    unknown = sorted(set(letters) - set("EtmL"))
    if unknown:
        yield f"--pp-layout {pp_layout} has {', '.join(unknown)} (E, t, m, L and | are known, and * to repeat)"
        return
    if len(stages) % pp:
        yield f"--pp-layout {pp_layout} has {len(stages)} stages over --pp {pp} (these work: {words(divisors(len(stages)))})"
        return
    if letters.count("E") != 1 or letters.count("L") != 1 or letters[0] != "E" or letters[-1] != "L":
        yield f"--pp-layout {pp_layout} must begin with its only E and end with its only L"
    if letters.count("t") != layers:
        yield f"--pp-layout {pp_layout} has {letters.count('t')} t (this works: {layers}, the model's layers)"
    if letters.count("m") != mtp:
        yield f"--pp-layout {pp_layout} has {letters.count('m')} m (this works: {mtp}, the model's MTP layers)"
    if "m" in letters and "t" in letters[letters.index("m") :]:
        yield f"--pp-layout {pp_layout} has a t after an m (MTP layers stand behind all others)"
    if sum("m" in stage for stage in stages) > 1:
        yield f"--pp-layout {pp_layout} has m in several stages (all MTP layers stand in one)"
    if any("m" in stage for stage in stages[:-pp]):
        yield f"--pp-layout {pp_layout} has m before a rank's last virtual stage (one of the last {pp} stages works)"


def _wrong_pattern(layers: str, asked: str, pp: int) -> Iterator[str]:
    if asked.replace("|", "") != layers:
        yield f"--pp-layout {asked} for a hybrid model (its pattern with | between stages works: {layers})"
    stages = asked.count("|") + 1
    if stages % pp:
        yield f"--pp-layout {asked} has {stages} stages over --pp {pp} (these work: {words(divisors(stages))})"


def divisors(number: int) -> list[int]:
    """Every divisor of a number above 0, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def words(numbers: list[int]) -> str:
    """The first few numbers for a message."""
    shown = [str(n) for n in numbers[:_SHOWN]]
    return ", ".join([*shown, "..."] if len(numbers) > _SHOWN else shown) or "none"
