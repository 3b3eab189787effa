"""torch Distributed Checkpoint under the names of modules: Megatron's ``torch_dcp`` and ``fsdp_dtensor``. Pure.

Both store every tensor of the whole model under the name that it has in the module, layer by layer and expert by expert:
``torch_dcp`` as ``model.<name>``, Megatron-FSDP as ``model.module.<name>``, with the parts of a SwiGLU ``linear_fc1`` apart
(``_w`` the gate, ``_v`` the other). Which part of which global tensor that is, Megatron says of a model with TP, PP and EP 1.

Megatron-FSDP's weights are the master copies that its optimizer steps on; tensors that TP cuts are merged along the dim that
is cut. Sources (megatron-core 0.19.2): megatron/training/checkpointing.py ``generate_state_dict``,
``preprocess_fsdp_dtensor_state_dict``; megatron/core/transformer/fsdp_dtensor_checkpoint.py;
megatron/core/optimizer/distrib_optimizer.py ``sharded_param_state_fsdp_dtensor``;
megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py ``make_fsdp_dtensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptguard.convert.canonical import Cell, GlobalTensor, SourceTable, State, in_order
from ckptguard.convert.plain_optimizer import of_rank, refuse_other_shape
from ckptguard.convert.sources import state_name, with_prepended
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.index import Index, TensorEntry
from ckptguard.core.pieces import Assembly, Piece
from ckptguard.core.plan import Stored
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.model_numbers import number
from ckptguard.megatron.reshard_args import target_args
from ckptguard.megatron.structure import LocalTensor, Part, Structures

FORMATS = ("torch_dcp", "fsdp_dtensor")
FSDP_MODEL = "model.module."
FSDP_STATE = "optimizer.state.module.module.module."
_META = "optimizer.param_to_group_meta."
_EMBEDDING = "embedding.word_embeddings.weight"
_NOT_COMMON = ("model", "rng_state", "rerun_state_machine")
_FSDP = ("use_megatron_fsdp", "use_torch_fsdp2")
_SHOWN = 4


def is_by_module(index: Index) -> bool:
    """Whether tensors are stored under the names of modules."""
    return index.format in FORMATS


def vocabulary_rows(index: Index) -> int | None:
    """Rows of the stored word embedding, padding included; None if it is not stored."""
    for name in (_EMBEDDING, f"model.{_EMBEDDING}", f"{FSDP_MODEL}{_EMBEDDING}"):
        if name in index.tensors:
            return index.tensors[name].shape[0]
    return None


def has_optimizer_state(index: Index) -> bool:
    """Whether tensors of optimizer state are stored."""
    return is_by_module(index) and any(name.startswith("optimizer.") for name in index.tensors)


def whole_model_args(args: Mapping[str, object], rows: int | None) -> dict[str, object]:
    """Args of the same model on one rank, without a distributed optimizer: that one's names are those of the format.

    Args:
        args: Of the run.
        rows: Of its word embedding, padding included.
    """
    whole = dict(target_args(args, Layout(), optimizer="plain", vocabulary_rows=rows).args)
    if rows is not None:
        whole["padded_vocab_size"] = rows  # one rank alone would pad it less
    return whole | {name: False for name in ("use_distributed_optimizer", *_FSDP) if name in whole}


def switched_off(args: Mapping[str, object]) -> dict[str, object]:
    """The args that a target of another form has otherwise: Megatron's FSDP reads and writes the forms by module only."""
    return {name: False for name in _FSDP if args.get(name)}


def switch_notes(before: Mapping[str, object], after: Mapping[str, object]) -> Iterator[str]:
    """Sentences on what the run that reads the target has to switch."""
    for name in _FSDP:
        if before.get(name) and not after.get(name):
            yield f"The source's run had {name}; the target is of a run without it."
    if after.get("use_distributed_optimizer") and not before.get("use_distributed_optimizer"):
        yield "The source's optimizer is not distributed; the target is of a run with --use-distributed-optimizer."


@dataclass(frozen=True, slots=True)
class Named:
    """A stored name, and what part of a module's own tensor stands under it.

    Attributes:
        name: In the index.
        tensor: The module's.
        local: The part.
    """

    name: str
    tensor: LocalTensor
    local: Box


def model_names(structures: Structures, prefix: str, is_split: Callable[[LocalTensor], bool]) -> Iterator[Named]:
    """The names of all tensors of a model.

    Args:
        structures: Of the model on one rank.
        prefix: Before the name in the module.
        is_split: Whether the two parts of a tensor stand under names of their own.
    """
    for chunk in structures.ranks[0].chunks:
        for tensor in chunk:
            if is_split(tensor):
                parts = sorted(tensor.parts, key=lambda part: part.local.offset)
                for part, ending in zip(parts, ("_w", "_v"), strict=True):
                    yield Named(f"{prefix}{tensor.name}{ending}", tensor, part.local)
            else:
                yield Named(prefix + tensor.name, tensor, whole(tensor.shape))


def common_objects(index: Index, blob: Callable[[str], bytes]) -> dict[str, bytes]:
    """The objects that make up the common state, by name; of parameters with equal param groups the first one's.

    Args:
        index: Of a checkpoint by modules, or of plain torch DCP, which has none.
        blob: The bytes of an object.
    """
    out, groups = {}, dict[str, dict[str, bytes]]()
    for name in index.objects:
        if name in index.files or name.startswith(_NOT_COMMON) or not is_by_module(index):
            continue
        if name.startswith(_META):
            parameter, _, _ = name.rpartition(".")
            groups.setdefault(parameter, {})[name] = blob(name)
        else:
            out[name] = blob(name)
    seen = set[tuple[bytes, ...]]()
    for group in groups.values():
        key = tuple(group.values())
        if key not in seen:
            seen.add(key)
            out |= group
    return out


def state_of(index: Index, structures: Structures) -> State:
    """The global tensors of a checkpoint by modules.

    Args:
        index: Of ``torch_dcp`` or ``fsdp_dtensor``.
        structures: Of the model on one rank (``whole_model_args``).

    Raises:
        UnsupportedError: The model is another one, or TP cut a tensor that cannot be put together again.
    """
    table = SourceTable()
    return State(to_global(index, structures, table), table)


def to_global(index: Index, structures: Structures, sources: SourceTable) -> dict[str, GlobalTensor]:
    """As ``state_of``; stored chunks get their names in ``sources``."""
    out = _Gathered(index, sources)
    if index.format == "fsdp_dtensor":
        _of_fsdp(index, structures, out)
    else:
        _of_torch_dcp(index, structures, out)
    left = [n for n in index.tensors if n not in out.taken and not n.startswith(("rng_state.", "rerun_state_machine"))]
    if out.missing or left:
        said = [(f"{len(out.missing)} are not stored", out.missing), (f"{len(left)} are stored without a place", left)]
        raise UnsupportedError(
            f"{index.location}: the model that Megatron builds from the stored args is not the one that is stored. Tensors: "
            + ". ".join(f"{what}: {'; '.join(names[:_SHOWN])}" for what, names in said if names),
            next_step="The args must be those of the run that wrote it, and the installed megatron-core must know the model.",
        )
    return out.tensors()


def _of_torch_dcp(index: Index, structures: Structures, out: _Gathered) -> None:
    if number(index.facts.args, "tensor_model_parallel_size", 1) > 1:
        raise UnsupportedError(f"{index.location}: ranks of tensor parallelism write the same names in torch_dcp")
    for named in model_names(structures, "model.", lambda _: False):
        out.add(named, "", None)
    for name in index.tensors:
        if name.startswith("optimizer."):
            found = of_rank(structures.ranks[0], structures, name)
            if found is None:
                continue
            kind, tensor = found
            if kind == "step":
                out.taken.add(name)  # of torch's own optimizer: one number, which the common state has
            else:
                out.add(Named(name, tensor, whole(tensor.shape)), kind, None)


def _of_fsdp(index: Index, structures: Structures, out: _Gathered) -> None:
    merged = number(index.facts.args, "tensor_model_parallel_size", 1) > 1

    def is_split(tensor: LocalTensor) -> bool:
        return len(tensor.parts) == 2 and f"{FSDP_MODEL}{tensor.name}_w" in index.tensors

    states: dict[str, list[str]] = {}
    for name in index.tensors:
        if name.startswith(FSDP_STATE):
            parameter, _, kind = name.removeprefix(FSDP_STATE).rpartition(".")
            states.setdefault(parameter, []).append(kind)
    for named in model_names(structures, FSDP_MODEL, is_split):
        if merged and len(named.tensor.parts) > 1 and not is_split(named.tensor):
            raise UnsupportedError(
                f"{index.location}: {named.name} is merged from the ranks of tensor parallelism, and each of its"
                f" {len(named.tensor.parts)} parts with it",
                next_step="Save it with a tensor parallel size of 1.",
            )
        parameter = named.name.removeprefix(FSDP_MODEL)
        out.add(named, "", BY_NAME[named.tensor.dtype])
        if parameter in states:
            out.add(named, "param", None)
        for kind in states.get(parameter, ()):
            out.add(Named(f"{FSDP_STATE}{parameter}.{kind}", named.tensor, named.local), kind, None)


@dataclass(slots=True)
class _Gathered:
    """Cells of global tensors, as their parts are found."""

    index: Index
    sources: SourceTable
    cells: dict[str, list[Cell]] = field(default_factory=dict)
    kinds: dict[str, tuple[DType, tuple[int, ...]]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)

    def add(self, named: Named, kind: str, dtype: DType | None) -> None:
        """Adds what is stored under a name: a weight, or the state of this kind; ``dtype`` is another one to be cast to."""
        entry = self.index.tensors.get(named.name)
        if entry is None:
            self.missing.append(named.name)
            return
        self.taken.add(named.name)
        if entry.shape != named.local.size:
            refuse_other_shape(self.index.location, entry, named.tensor)
        for part in named.tensor.parts:
            name = state_name(kind, part.key) if kind else part.key
            found = list(self._cells(entry, named.local, part))
            if found:
                self.kinds[name] = (dtype or entry.dtype, part.shape)
                self.cells.setdefault(name, []).extend(found)

    def _cells(self, entry: TensorEntry, local: Box, part: Part) -> Iterator[Cell]:
        for chunk in entry.chunks:
            here = Box(tuple(a + b for a, b in zip(chunk.box.offset, local.offset, strict=True)), chunk.box.size)
            common = here.intersect(part.local)
            if common is None:
                continue
            source, strides = in_order(Stored(entry, chunk))
            first = sum(o * s for o, s in zip(common.relative_to(here).offset, strides, strict=True))
            piece = Piece(
                (0,) * len(strides), common.size, (1,) * len(strides), self.sources.name_of(source), first, strides
            )
            assembly = with_prepended(Assembly(common.size, (piece,)), len(part.shape))
            yield Cell(global_box(part, common), assembly)

    def tensors(self) -> dict[str, GlobalTensor]:
        """The global tensors."""
        return {name: GlobalTensor(name, *self.kinds[name], tuple(cells)) for name, cells in self.cells.items()}


def global_box(part: Part, local: Box) -> Box:
    """The box of the global tensor that a box of the module's tensor inside a part is."""
    prepended = len(part.shape) - len(local.size)
    moved = zip(local.offset, part.local.offset, part.box.offset[prepended:], strict=True)
    offset = part.box.offset[:prepended] + tuple(at - begin + to for at, begin, to in moved)
    return Box(offset, (1,) * prepended + local.size)
