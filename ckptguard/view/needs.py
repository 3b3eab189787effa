"""Which data files the ranks of each node read when Megatron loads a step.

Too many may be named, too few never: where a load plan cannot be made, every node needs every file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from ckptguard.core.errors import EnvironmentFailedError, UnsupportedError
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.load_plan import load_plan, run_of
from ckptguard.view.values import Needs, Step

Ranks = Mapping[int, tuple[int, ...]]


def needed(
    staged: Path,
    step: Step,
    *,
    ranks: Ranks,
    layout: Layout | None,
    names: Sequence[str],
    arguments: Mapping[str, object] | None = None,
) -> Needs:
    """The data files that each node's ranks read.

    Megatron is asked, in a process of its own, which takes seconds.

    Args:
        staged: Directory that holds the step's folder with its index files, and the data files with common state.
        step: Which.
        ranks: Of every node, the global ranks on it; an empty tuple if they are not known.
        layout: The layout that the step is to be loaded under; None is the one that it was saved with.
        names: All data files of the step, as named in the view.
        arguments: Training args, as plain values, that the run changes beside its layout.

    Raises:
        UsageError: The layout is not possible for the model, or not with so many ranks.
        DamagedError: The staged index cannot be read.
    """
    unknown = _why_unknown(ranks)
    if unknown:
        return _everything(ranks, names, unknown)
    if step.kind == "local":
        return _of_own_ranks(ranks, names)
    try:
        return _planned(staged, step, ranks, layout, names, arguments or {})
    except (UnsupportedError, EnvironmentFailedError) as error:
        return _everything(ranks, names, error.message.splitlines()[0])


def _why_unknown(ranks: Ranks) -> str:
    """Why it is not known which node has which rank; "" if it is."""
    for node, own in sorted(ranks.items()):
        if not own:
            return f"the ranks of node {node} are not known"
    given = sorted(rank for own in ranks.values() for rank in own)
    if given != list(range(len(given))):
        return f"the ranks of the nodes are not 0 to {len(given) - 1}, each once"
    return ""


def _everything(ranks: Ranks, names: Sequence[str], why: str) -> Needs:
    return Needs({node: tuple(names) for node in ranks}, f"all files: {why}")


def _of_own_ranks(ranks: Ranks, names: Sequence[str]) -> Needs:
    """A local file is read by the rank whose state it is: ``<session>/<rank>/iter_0000020_<rank>_local.pt``."""
    owners = {name: PurePosixPath(name).parent.name for name in names}
    own = {node: {str(rank) for rank in on_node} for node, on_node in ranks.items()}
    return Needs(
        {n: tuple(x for x in names if owners[x] in own[n] or not owners[x].isdigit()) for n in ranks},
        "the files of the ranks on each node",
    )


def _planned(
    staged: Path,
    step: Step,
    ranks: Ranks,
    layout: Layout | None,
    names: Sequence[str],
    arguments: Mapping[str, object],
) -> Needs:
    with open_checkpoint(staged / step.folder) as checkpoint:
        index = checkpoint.index
    if index.format != "torch_dist":
        raise UnsupportedError(
            f"{index.format} cuts tensors among data parallel ranks too, as Megatron cannot be asked about"
        )
    run = run_of({**index.facts.args, **arguments}, layout, sum(map(len, ranks.values())))
    plan = load_plan(index, run)
    spoken_of = set(index.spans())
    files = {name: str(PurePosixPath(name).relative_to(step.folder)) for name in names}
    out = {}
    for node, own in ranks.items():
        read = plan.files_of(own)
        out[node] = tuple(name for name in names if files[name] in read or files[name] not in spoken_of)
    return Needs(out, f"the load plan of {run.title}, asked of Megatron Core {plan.megatron}")
