"""The plan of a legacy target (``--ckpt-format torch``): every rank's files, and what their tensors are made of. Pure.

Source: megatron/training/checkpointing.py ``save_checkpoint``, megatron/core/optimizer/distrib_optimizer.py
``get_parameter_state_dp_zero`` ("buckets_coalesced"), megatron/core/optimizer/optimizer.py
``ChainedOptimizer.save_parameter_state`` (0.19.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptguard.convert.canonical import State
from ckptguard.convert.sources import into_local, state_name
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.pieces import Assembly, Piece, of_source
from ckptguard.core.plan import Made, Sources
from ckptguard.core.writing import Elements, TargetFile
from ckptguard.engine.filling import row_bytes
from ckptguard.formats.torch_file_writer import StorageToWrite, torch_file
from ckptguard.megatron.legacy_parts import folder_of
from ckptguard.megatron.legacy_pickles import (
    OPTIMIZER_STATES,
    BufferState,
    ExtraState,
    ModelFile,
    ModelTensor,
    OptimizerFile,
    Pickled,
    RankFile,
)
from ckptguard.megatron.structure import Bucket, Buffer, LocalTensor, RankStructure, Structures

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
_FLOAT32 = BY_NAME["float32"]


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """A file of the target.

    Attributes:
        file: What it holds.
        tensors: Of each of its tensors, in the order of the description, the chunks that make it up, one behind the other.
    """

    file: RankFile
    tensors: tuple[tuple[Made, ...], ...]


@dataclass(frozen=True, slots=True)
class LegacyPlan:
    """A planned target.

    Attributes:
        files: Rank by rank, the optimizer's first, as Megatron writes them.
        sources: What the pieces of their chunks name.
    """

    files: tuple[LegacyFile, ...]
    sources: Sources

    @property
    def descriptions(self) -> tuple[RankFile, ...]:
        """What every file holds."""
        return tuple(file.file for file in self.files)

    @property
    def chunks(self) -> tuple[Made, ...]:
        """All chunks in the order of the files; the keys of ``target_files`` are their numbers in it."""
        return tuple(made for file in self.files for tensor in file.tensors for made in tensor)


def plan_legacy(
    state: State,
    structures: Structures,
    *,
    folder: str,
    states: Iterable[str] = (),
    extra_states: Mapping[int, Sequence[Sequence[ExtraState]]] | None = None,
) -> LegacyPlan:
    """Plans all files of a target.

    Every model-parallel rank's file holds all of the rank's own tensors, copies of other ranks' included; optimizer state
    is in the file of the first rank of the group that shards it.

    Args:
        state: The source's global tensors. Weights keep their element types; optimizer state is float32 in these files.
        structures: The ranks of the target layout.
        folder: Of the iteration, such as ``iter_0000004``.
        states: The optimizer states that the source has (``sources.states_in``), to be stored; none leaves the optimizer out.
        extra_states: By rank, of each of its model chunks, the ``_extra_state`` entries of its state_dict.

    Raises:
        UnsupportedError: The files have no place for a part of the state, or a part of it is not there.
    """
    names = _checked(tuple(states), structures)
    found = _Found(state)
    ranks = _file_ranks(structures)
    files: list[LegacyFile] = []
    for path, rank in ranks.items():
        if names:
            files += _optimizer_file(f"{folder}/{path}/{OPTIMIZER_FILE}", rank, structures, found)
        extra = (extra_states or {}).get(rank.rank, [()] * len(rank.chunks))
        files.append(_model_file(f"{folder}/{path}/{MODEL_FILE}", rank, extra, found, with_optimizer=bool(names)))
    return LegacyPlan(tuple(files), state.sources)


def target_files(plan: LegacyPlan, pickles: Sequence[Pickled]) -> tuple[TargetFile, ...]:
    """The files as rows of bytes, elements of which are filled by their number in ``plan.chunks``.

    Args:
        plan: The target.
        pickles: Of each of its files (``legacy_pickles.rank_pickles`` of its descriptions).
    """
    out, key = [], 0
    for file, pickled in zip(plan.files, pickles, strict=True):
        parts: list[tuple[Elements, ...]] = []
        for tensor in file.tensors:
            parts.append(tuple(Elements(key + n, m.size_bytes, row_bytes(m)) for n, m in enumerate(tensor)))
            key += len(tensor)
        contents = (content if isinstance(content, bytes) else parts[content] for content in pickled.storages)
        storages = [StorageToWrite(str(n), content) for n, content in enumerate(contents)]
        out.append(torch_file(file.file.path, pickled.data, storages))
    return tuple(out)


def _checked(states: tuple[str, ...], structures: Structures) -> tuple[str, ...]:
    """The states to be stored, in the files' order.

    Raises:
        UnsupportedError: ``distrib_optim.pt`` does not have just these, or the buckets are not known.
    """
    if not states:
        return ()
    if set(states) != set(OPTIMIZER_STATES):
        raise UnsupportedError(
            f"legacy files hold the optimizer states {', '.join(OPTIMIZER_STATES)}; the source has"
            f" {', '.join(sorted(states))}",
            next_step="Convert the weights alone with --optimizer none, or choose --to torch_dist.",
        )
    if structures.no_buckets:
        raise UnsupportedError(
            f"where optimizer state stands in legacy files is not known for this run: {structures.no_buckets}",
            next_step="Convert the weights alone with --optimizer none, or choose --to torch_dist.",
        )
    return OPTIMIZER_STATES


def _file_ranks(structures: Structures) -> dict[str, RankStructure]:
    """Of each folder the rank whose tensors its files hold.

    Raises:
        UnsupportedError: Ranks with different tensors have one folder: its name has no place for the expert tensor rank.
    """
    out: dict[str, RankStructure] = {}
    for rank in structures.ranks:
        folder = folder_of(rank, structures)
        known = out.setdefault(folder, rank)
        if _held(known) != _held(rank):
            raise UnsupportedError(
                f"legacy files name a rank's folder by its tensor, pipeline and expert rank; in this layout {folder} is that of"
                f" ranks {known.rank} and {rank.rank}, which hold different parts of the experts",
                next_step="Choose an --etp that divides --tp, or --to torch_dist.",
            )
        if _writes(rank) > _writes(known):
            out[folder] = rank
    return out


def _held(rank: RankStructure) -> list[tuple[str, Box, Box]]:
    """What a rank holds, whether it or another rank saves it."""
    return [(p.key, p.box, p.local) for chunk in rank.chunks for tensor in chunk for p in tensor.parts]


def _writes(rank: RankStructure) -> int:
    """How many of its optimizers' states a rank writes."""
    return (not rank.at["dense_dp"]) + (not rank.at["expert_dp"])


def _optimizers(rank: RankStructure, structures: Structures) -> tuple[tuple[str, tuple[Buffer, ...] | None], ...]:
    """(what it is called, its buffers or None if another rank writes them) of each of a rank's optimizers."""
    dense = ("dense", None if rank.at["dense_dp"] else rank.dense)
    if not structures.has_expert_optimizer:
        return (dense,)
    return dense, ("expert", None if rank.at["expert_dp"] else rank.expert)


class _Found:
    """What parts of global tensors are made of; what is not there is said."""

    def __init__(self, state: State) -> None:
        self._state = state

    def dtype_of(self, name: str) -> DType:
        """Element type of a global tensor. Raises UnsupportedError if there is none."""
        if name not in self._state.tensors:
            raise UnsupportedError(f"{name}: the ranks of the target hold it, and the source has no such tensor")
        return self._state.tensors[name].dtype

    def of(self, name: str, box: Box) -> Assembly:
        """What a box is made of. Raises UnsupportedError if the tensor, or a part of the box, is not there."""
        self.dtype_of(name)
        assembly = self._state.assembly(name, box)
        if (there := sum(piece.numel for piece in assembly.pieces)) != box.numel:
            raise UnsupportedError(
                f"{name}: a rank of the target holds its box {box}, and the source has {there} of its {box.numel} elements"
            )
        return assembly


def _model_file(
    path: str, rank: RankStructure, extra: Sequence[Sequence[ExtraState]], found: _Found, *, with_optimizer: bool
) -> LegacyFile:
    chunks: list[tuple[ModelTensor | ExtraState, ...]] = []
    made: list[tuple[Made, ...]] = []
    for tensors, others in zip(rank.chunks, extra, strict=True):
        described = []
        for tensor in tensors:
            dtype = _one_dtype(tensor, found)
            described.append(ModelTensor(tensor.name, dtype.name, tensor.shape))
            made.append(_nonempty(_local(f"{path}:{tensor.name}", dtype, tensor, "", found)))
        chunks.append((*described, *others))
    return LegacyFile(ModelFile(path, tuple(chunks), with_optimizer), tuple(made))


def _optimizer_file(path: str, rank: RankStructure, structures: Structures, found: _Found) -> Iterator[LegacyFile]:
    """The file of a rank that writes state of at least one of its optimizers."""
    optimizers = _optimizers(rank, structures)
    if all(buffers is None for _, buffers in optimizers):
        return
    described: list[tuple[BufferState, ...] | None] = []
    made: list[tuple[Made, ...]] = []
    for what, buffers in optimizers:
        if buffers is None:
            described.append(None)
            continue
        states = []
        for number, buffer in enumerate(buffers):
            states.append(BufferState(_dtypes(buffer), sum(bucket.numel for bucket in buffer.buckets)))
            for state in OPTIMIZER_STATES:
                name = f"{path}:{what}.{number}.{state}"
                parts = (m for bucket in buffer.buckets for m in _of_bucket(name, bucket, state, found))
                made.append(tuple(m for part in parts for m in _nonempty(part)))
        described.append(tuple(states))
    yield LegacyFile(OptimizerFile(path, tuple(described)), tuple(made))


def _of_bucket(name: str, bucket: Bucket, state: str, found: _Found) -> Iterator[Made]:
    """A bucket's elements in order: the state of its parameters, each row-major, and zeros between them."""
    gaps = iter(bucket.gaps())
    gap = next(gaps, None)
    for place in bucket.places:
        if gap and gap[0] < place.begin:
            yield _zeros(name, gap[1] - gap[0])
            gap = next(gaps, None)
        made = _local(f"{name}.{place.tensor.name}", _FLOAT32, place.tensor, state, found)
        if made.box.numel != place.end - place.begin:
            raise UnsupportedError(
                f"{made.name}: {made.box.numel} elements, and Megatron's bucket has {place.end - place.begin} for them"
            )
        yield made
    if gap:
        yield _zeros(name, gap[1] - gap[0])


def _local(name: str, dtype: DType, tensor: LocalTensor, state: str, found: _Found) -> Made:
    """A rank's own tensor, or one state of it, put together from its parts of global tensors."""
    pieces: list[Piece] = []
    for part in tensor.parts:
        assembly = found.of(state_name(state, part.key) if state else part.key, part.box)
        pieces += (into_local(piece, part.local) for piece in assembly.pieces)
    if (there := sum(piece.numel for piece in pieces)) != whole(tensor.shape).numel:
        raise UnsupportedError(
            f"{name}: global tensors hold {there} elements of a tensor of shape {list(tensor.shape)}"
        )
    return Made(name, dtype, tensor.shape, whole(tensor.shape), Assembly(tensor.shape, tuple(pieces)))


def _zeros(name: str, numel: int) -> Made:
    return Made(f"{name} (padding)", _FLOAT32, (numel,), whole((numel,)), of_source("", (numel,)))


def _nonempty(made: Made) -> tuple[Made, ...]:
    return (made,) if made.size_bytes else ()


def _one_dtype(tensor: LocalTensor, found: _Found) -> DType:
    dtypes = {found.dtype_of(part.key) for part in tensor.parts}
    if len(dtypes) != 1:
        names = " and ".join(sorted(dtype.name for dtype in dtypes))
        raise UnsupportedError(
            f"{tensor.name}: its parts are {names}; in a legacy file they are one tensor of one type"
        )
    return next(iter(dtypes))


def _dtypes(buffer: Buffer) -> tuple[str, str]:
    """Of parameters and gradients, from ``(torch.bfloat16, torch.float32)``."""
    parameters, gradients = buffer.dtype.strip("()").replace("torch.", "").split(", ")
    return parameters, gradients
