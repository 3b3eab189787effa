"""A checkpoint that is to be resharded: its global tensors, what stands beside them, and what Megatron says of its layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckptguard.convert import dcp_names, gathered_state, plain_optimizer
from ckptguard.convert.canonical import State
from ckptguard.convert.iterations import refuse_damage
from ckptguard.convert.sources import needs_structures, state_of
from ckptguard.core.boxes import Box, whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.errors import DamagedError, UnsupportedError, UsageError
from ckptguard.core.index import Chunk, Index, Span, TensorEntry
from ckptguard.core.pieces import of_source
from ckptguard.core.plan import Made, Stored
from ckptguard.engine.contents import wrong_crc
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.facts import kind_of_name
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.legacy_names import to_global_view
from ckptguard.megatron.model_numbers import number
from ckptguard.megatron.structure import Structures

_GROUP_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(?:optimizer|grad_scaler)/shard_0_1"
)
_PER_RANK = ("rng_state/", "rerun_state_machine_state/", "optimizer.", "chained_", "common_state/")
# Made anew for the target, or true of the source's files only.
_NOT_CARRIED = (
    ".metadata",
    "metadata.json",
    "common.pt",
    "integrity.json",
    "train_state.pt",
    "run_config.yaml",
    FILE_NAME,
)

GET_AGAIN = "The target did not appear. Get again what is named, or go back to an older step."


@dataclass(frozen=True)
class ReshardSource:
    """An open source.

    Attributes:
        checkpoint: With the index under global names.
        state: Its global tensors.
        layout: The one that it was saved in.
        iteration: Its step.
    """

    checkpoint: Checkpoint
    state: State
    layout: Layout
    iteration: int | Literal["release"]

    @property
    def index(self) -> Index:
        """What is known of it."""
        return self.checkpoint.index

    def common(self) -> bytes | Path | dict[str, bytes]:
        """What restating reads the common state from: bytes, the path of a legacy file, or its objects by name."""
        index = self.index
        if index.format == "torch":
            name = min(n for n in index.objects if n.endswith(("model_optim_rng.pt", "model_rng.pt")))
            return self.checkpoint.files.checked_path(name)
        names = [n for n in index.objects if n == "common.pt" or n.startswith("common_state/")]
        if not names and index.format != "torch_dist":
            return dcp_names.common_objects(index, self.blob)
        if not names:
            raise UnsupportedError(
                f"{index.location}: has no common state (common.pt or the object common_state), so its run is not known"
            )
        return self.blob("common.pt" if "common.pt" in names else names[0])

    def blob(self, name: str) -> bytes:
        """The bytes of an object."""
        return self.checkpoint.files.read_span(self.index.objects[name].span)

    def group_states(self) -> dict[str, bytes]:
        """What each optimizer's group of ranks stores beside its buckets."""
        return {name: self.blob(name) for name in self.index.objects if _GROUP_STATE.fullmatch(name)}

    def file(self, name: str) -> bytes | None:
        """A small file, if it is there."""
        return self.checkpoint.files.read(name) if name in self.index.files else None

    def objects_named(self, prefix: str) -> list[str]:
        """Names of the objects that begin so."""
        return [name for name in self.index.objects if name.startswith(prefix)]

    def own_objects(self) -> list[str]:
        """Objects of the model and whatever else is no rank's: they go along as they are."""
        files = self.index.files
        if dcp_names.is_by_module(self.index):
            return []
        return [name for name in self.index.objects if name not in files and not name.startswith(_PER_RANK)]

    def check_of(self, made: Made) -> Callable[[int], None] | None:
        """Of a chunk that goes along uncut: holds the CRC-32 of what was read against the one stored beside it."""
        stored = self.state.uncut(made)
        if stored is None:
            return None

        def check(crc32: int) -> None:
            at = self.checkpoint.reader.locate(stored.entry, stored.chunk)
            if at.crc32 is not None and at.crc32 != crc32 and at.span.length_bytes == made.size_bytes:
                problem = wrong_crc(at.span.file, stored.entry.name, stored.chunk.box)
                raise DamagedError(
                    f"{self.index.location}: damaged: {problem.message}", problems=[problem], next_step=GET_AGAIN
                )

        return check

    def side_files(self) -> tuple[Made, ...]:
        """Files that are no part of the format (tokenizer, loader state...), as chunks of bytes that are their own."""
        index = self.index
        data = {chunk.span.file for entry in index.tensors.values() for chunk in entry.chunks}
        data |= {entry.span.file for entry in index.objects.values() if entry.span.file != entry.name}
        data |= {name for name in index.files if name.startswith("mp_rank_")}
        names = [n for n in index.files if n not in data and n not in _NOT_CARRIED and not _is_unfinished(n)]
        return tuple(self._as_chunk(name, index.files[name].size_bytes) for name in names)

    def _as_chunk(self, name: str, size_bytes: int) -> Made:
        shape, dtype = (size_bytes,), BY_NAME["uint8"]
        chunk = Chunk(whole(shape), Span(name, 0, size_bytes))
        # The box's name keeps the source apart from a tensor that is called like the file.
        source = Stored(TensorEntry(f"file {name}", dtype, shape, (chunk,)), chunk)
        return Made(name, dtype, shape, Box((0,), shape), of_source(self.state.sources.name_of(source), shape))


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and ".partial-" in name


def refuse_unfit(checkpoint: Checkpoint) -> None:
    """Raises if a checkpoint cannot be resharded whatever the target: damage, another kind of model, no args.

    Raises:
        UsageError: A Hugging Face snapshot.
        DamagedError: Parts of it are missing or not what its index says; all of them.
        UnsupportedError: It does not say what model it holds.
    """
    index = checkpoint.index
    if index.format == "huggingface":
        raise UsageError(
            f"{index.location}: a Hugging Face snapshot has no layout to change",
            next_step="Make a Megatron checkpoint of it with `ckptguard import`.",
        )
    refuse_damage(
        checkpoint, doing="resharded", next_step="Run `ckptguard verify` for the list; get again what it names."
    )
    if not index.facts.args:
        raise UnsupportedError(
            f"{index.location}: no training args are stored, so the model is not known and Megatron cannot be asked where"
            " its tensors belong",
            next_step="Say them with --args FILE, as JSON or YAML: those of the run that saved it.",
        )


def layout_of(args: Mapping[str, object]) -> Layout:
    """The layout that training args say, VPP and uneven stages included."""

    def size(name: str, default: int = 1) -> int:
        return number(args, name) or default

    def count(name: str) -> int | None:
        return number(args, name) or None

    tp, pp, cp = (size(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context"))
    text = args.get("pipeline_model_parallel_layout")
    world = count("world_size")
    return Layout(
        tp=tp, pp=pp, cp=cp,
        ep=size("expert_model_parallel_size"),
        etp=size("expert_tensor_parallel_size", tp),
        vpp=size("virtual_pipeline_model_parallel_size"),
        first_pp_layers=count("decoder_first_pipeline_num_layers"),
        last_pp_layers=count("decoder_last_pipeline_num_layers"),
        pp_layout=text if isinstance(text, str) else None,
        count_embedding=bool(args.get("account_for_embedding_in_pipeline_split")),
        count_loss=bool(args.get("account_for_loss_in_pipeline_split")),
        dp=count("data_parallel_size") or (world // (tp * pp * cp) if world else None),
    )  # fmt: skip


def open_source(
    checkpoint: Checkpoint, structures: Structures | None, *, keeps_optimizer: bool = True
) -> ReshardSource:
    """Describes a source; nothing of its tensors is read.

    Args:
        checkpoint: An open checkpoint that ``refuse_unfit`` let pass.
        structures: What Megatron says of its own layout; needed if ``asks_for_source``.
        keeps_optimizer: Whether its optimizer's state is wanted; one that is not need not be in a form that is understood.

    Raises:
        UnsupportedError: A form of state that cannot be taken apart, or Megatron's model is another one.
    """
    index = checkpoint.index
    _refuse_fp8_state(index)
    if not keeps_optimizer:
        weights = {name: entry for name, entry in index.tensors.items() if kind_of_name(name) == "weights"}
        index = replace(index, tensors=weights)
    if index.format == "torch":
        assert structures is not None, "asks_for_source"
        index = plain_optimizer.legacy_to_global(to_global_view(index, structures=structures).index, structures)
    said = index.facts.iteration
    iteration: int | Literal["release"] = said if said else "release"
    if structures is not None and keeps_optimizer:
        index = gathered_state.to_global(index, checkpoint.reader, structures)
    opened = replace(checkpoint, index=index)
    if dcp_names.is_by_module(index):
        assert structures is not None, "asks_for_source"
        state = dcp_names.state_of(index, structures)
    else:
        state = state_of(index, structures)
    return ReshardSource(opened, state, layout_of(index.facts.args), iteration)


def _refuse_fp8_state(index: Index) -> None:
    """Raises if legacy files hold Transformer Engine's fp8 state: there a rank has it merged over its experts."""
    if index.format != "torch":
        return
    full = [name for name, entry in index.tensors.items() if name.endswith("._extra_state") and entry.numel]
    if full:
        raise UnsupportedError(
            f"{index.location}: {len(full)} modules have fp8 state, such as {full[0]}; from legacy files it cannot be carried",
            next_step="Save it once as torch_dist with Megatron (--ckpt-convert-format torch_dist), in the layout that it has.",
        )


def asks_for_source(index: Index) -> bool:
    """Whether Megatron has to be asked about the source's own layout."""
    gathered = any(map(gathered_state.is_gathered, index.objects))
    return index.format == "torch" or gathered or dcp_names.is_by_module(index) or needs_structures(index)
