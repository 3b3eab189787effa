"""What the asking process does for a Hugging Face model: its Megatron form under a layout, and which element goes where.

Sources: megatron/bridge/models/conversion/model_bridge.py ``load_weights_hf_to_megatron`` and ``build_conversion_tasks``,
megatron/bridge/models/model_provider.py ``_create_model`` (megatron-bridge 0.6.2).
"""

from __future__ import annotations

import base64
import logging
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ckptguard.core import pieces
from ckptguard.core.errors import UnsupportedError
from ckptguard.core.pieces import Assembly
from ckptguard.layout.layouts import Layout
from ckptguard.megatron import bridges, hf_layouts, hf_names, tracing, worker, worlds
from ckptguard.megatron.hf_source import NotInSnapshotError, Source
from ckptguard.megatron.model_args import NEUTRAL
from ckptguard.megatron.stored_state import stored_files

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# megatron/core/transformer/mla_qk_norm_config.py (0.19.2) gives this projection a norm that no released model has.
_ONLY_MEGATRON = {
    "self_attention.linear_q_proj.layer_norm_weight": "Megatron Core 0.19 normalises the input of an MLA query projection "
    "without LoRA once more, the Hugging Face model does not: outputs will differ",
}
_LAYER = re.compile(r"layers\.\d+\.")


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """The plain form of ``hf_structure.Structure``; the question is ``hf_structure.ask_structure``'s."""
    logging.disable(logging.WARNING)
    known = _typed(question["tensors"] or {})
    source = Source(known)
    bridges.enter()
    source.install()
    family = bridges.load(question["config"])
    config = bridges.read_config(Path(question["folder"]), question["config"])
    worlds.forget_devices()  # not before transformers is imported, which names devices in its annotations
    bridge, layout = family.bridge, Layout(**question["layout"])
    bridge.hf_config, bridge.hf_pretrained = config, Namespace(config=config, state=source)
    dtype = getattr(torch, question["dtype"])
    provider = _provider(bridge, dtype)
    hf_layouts.refuse(provider, layout, family.architecture)
    padded = hf_layouts.padded_vocabulary(provider, layout, question["pad_vocabulary_to"])
    exported = _exported(bridge, dtype, padded) if question["tensors"] is None else {}
    known |= _typed(exported)
    files, notes = _stored(bridge, dtype, layout, question)
    tensors, tracer = _world_of_one(bridge, _without_kernels(_provider(bridge, dtype)), padded, source)
    return {
        "architecture": family.architecture,
        "megatron": version("megatron-core"),
        "bridge": version("megatron-bridge"),
        "templates": tracer.templates,
        "tensors": tensors,
        "unmapped": [item["name"] for item in tensors if item["template"] is None],
        "derived": source.derived,
        "ranks": list(_ranks(_without_kernels(provider), layout, padded)),
        "tied": bool(provider.share_embeddings_and_output_weights),
        "files": {name: base64.b64encode(data).decode() for name, data in files.items()},
        "notes": [*notes, *tracer.notes],
        "exported": exported,
    }


def _typed(tensors: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (getattr(torch, dtype), shape) for name, (dtype, shape) in tensors.items()}


def _provider(bridge: Any, dtype: torch.dtype) -> Any:
    """Bridge's description of the model in a dtype."""
    shim = Namespace(
        config=bridge.hf_config, generation_config=None, state=bridge.hf_pretrained.state, model_name_or_path="",
        trust_remote_code=False,
    )  # fmt: skip
    provider = bridge.provider_bridge(shim)
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    return provider


def _without_kernels(provider: Any) -> Any:
    """What has no bearing on the tensors, set to what needs no kernels."""
    for name, value in {**NEUTRAL, "use_cpu_initialization": False}.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    return provider


def _stored(
    bridge: Any, dtype: torch.dtype, layout: Layout, question: Mapping[str, Any]
) -> tuple[dict[str, bytes], Sequence[str]]:
    """What is stored beside the tensors: {"common_state", "iteration/NAME", "root/NAME"}; and notes."""
    wanted = question["store_as"]
    if not wanted:
        return {}, ()
    provider = _provider(bridge, dtype)
    hf_layouts.apply(provider, layout)
    provider.should_pad_vocab = True
    if question["pad_vocabulary_to"]:
        provider.make_vocab_size_divisible_by = question["pad_vocabulary_to"]
    provider.finalize()
    stored = stored_files(provider, hf_model_id=wanted["hf_model_id"], iteration=wanted["iteration"], dtype=dtype)
    files = {"common_state": stored.common_state}
    files |= {f"iteration/{name}": data for name, data in stored.iteration_files.items()}
    files |= {f"root/{name}": data for name, data in stored.root_files.items()}
    return files, stored.notes


def _exported(bridge: Any, dtype: torch.dtype, padded: int) -> hf_names.Exported:
    """What Bridge would export of the unsplit model."""
    provider = _without_kernels(_provider(bridge, dtype))
    rows = int(provider.vocab_size)
    hf_layouts.apply(provider, Layout())
    provider.vocab_size, provider.should_pad_vocab = padded, False
    for _, (model,) in _models(provider, Layout()):
        return hf_names.exported(bridge, model, rows)
    raise AssertionError("a world has a rank")


def _world_of_one(bridge: Any, provider: Any, padded: int, source: Source) -> tuple[list[dict[str, Any]], _Tracer]:
    """Every tensor of the unsplit model: where it stands globally, and what of the snapshot it is made of."""
    hf_layouts.apply(provider, Layout())
    provider.vocab_size, provider.should_pad_vocab = padded, False
    for _, (model,) in _models(provider, Layout()):
        tracer, tensors = _Tracer(bridge, model, source), []
        for item in worker.describe_chunk(model, {}, 0):
            template, sources = tracer.template(item["name"], tuple(item["shape"]))
            tensors.append({**item, "template": template, "sources": sources})
        return tensors, tracer
    raise AssertionError("a world has a rank")


def _ranks(provider: Any, layout: Layout, padded: int) -> Iterator[dict[str, Any]]:
    """What each rank of the target layout owns: boxes of global tensors, and objects."""
    hf_layouts.apply(provider, layout)
    provider.sequence_parallel = layout.tp > 1  # cuts no tensor, and the absorbed MLA of GLM 5 is not built without it
    provider.vocab_size, provider.should_pad_vocab = padded, False
    for rank, chunks in _models(provider, layout):
        parts, objects = [], []
        for chunk in chunks:
            sharded = worker.sharded_state(chunk, {})
            for item in worker.describe_sharded(chunk, sharded, rank):
                parts += [[p["key"], p["shape"], p["offset"], p["local_size"]] for p in item["parts"]]
            objects += worker.object_keys(sharded)
        yield {"rank": rank, "at": worlds.coordinates(), "parts": parts, "objects": objects}


def _models(provider: Any, layout: Layout) -> Iterator[tuple[int, list[Any]]]:
    """Yields (rank, model chunks) with Megatron's groups set up for the rank while it is current."""
    from megatron.core.pipeline_parallel.utils import (
        is_pp_first_stage,
        is_pp_last_stage,
        is_vp_first_stage,
        is_vp_last_stage,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider.finalize()
    for rank in worlds.ranks(hf_layouts.as_args(layout)):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        provider._pg_collection = groups
        stages: list[int | None] = [*range(layout.vpp)] if layout.vpp > 1 else [None]
        chunks = []
        with torch.device("meta"), worlds.without_compiler():
            for stage in stages:
                first = is_pp_first_stage(groups.pp) and is_vp_first_stage(
                    stage, layout.vpp if stage is not None else None
                )
                last = is_pp_last_stage(groups.pp) and is_vp_last_stage(
                    stage, layout.vpp if stage is not None else None
                )
                more = {} if stage is None else {"vp_stage": stage}
                chunks.append(provider.provide(pre_process=first, post_process=last, **more))
        yield rank, chunks


class _Tracer:
    """Runs Bridge's mapping of each parameter once per kind: layers of one kind share a template."""

    def __init__(self, bridge: Any, model: Any, source: Source) -> None:
        from megatron.bridge.models.conversion.utils import persistent_buffers

        self.bridge, self.model, self.source = bridge, model, source
        self.registry = bridge.mapping_registry()
        self.templates: list[Any] = []
        self.notes: list[str] = []
        self._known: dict[Any, int] = {}
        self._modules = dict(model.named_modules())
        self._mapped = {name for name, _ in chain(model.named_parameters(), persistent_buffers(model))}

    def template(self, name: str, shape: tuple[int, ...]) -> tuple[int | None, list[str]]:
        """Number of the template and its sources' names for a parameter; None if Bridge has no mapping for it."""
        mapping = self.registry.megatron_to_hf_lookup(name) if name in self._mapped else None
        if mapping is None:
            return self._made_up(name, shape)
        roles = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        key = (_LAYER.sub("layers.*.", name), type(mapping), shape, self.source.looks_of(roles))
        number = self._known.get(key)
        if number is None:
            traced = self._trace(mapping, name, shape)
            named = self.source.roles_of(traced.assembly.sources, roles)
            number = len(self.templates)
            self.templates.append(_plain(traced, named))
            if not any(role[0] == "=" for role in named):
                self._known[key] = number
        return number, [self.source.name_of(role, roles) for role in self.templates[number]["roles"]]

    def _made_up(self, name: str, shape: tuple[int, ...]) -> tuple[int | None, list[str]]:
        """Ones for what only Megatron has, where that is known; says so once."""
        reason = next((reason for end, reason in _ONLY_MEGATRON.items() if name.endswith(end)), None)
        if reason is None:
            return None, []
        note = f"{_LAYER.sub('layers.*.', name)}: filled with ones; {reason}"
        if note not in self.notes:
            self.notes.append(note)
        ones = self.source.ones(shape)
        key = ("ones", shape)
        if key not in self._known:
            self._known[key] = len(self.templates)
            self.templates.append(_plain(ones, [["=", ones.assembly.sources[0]]]))
        return self._known[key], list(ones.assembly.sources)

    def _trace(self, mapping: Any, name: str, shape: tuple[int, ...]) -> tracing.Traced:
        module = self._modules[name.rpartition(".")[0]]
        if not hasattr(module, "config"):
            module.config = self.model.config
        try:
            with torch.no_grad():
                weights = self.bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, self.source)
                out = mapping.hf_to_megatron(weights, module)
        except NotInSnapshotError as error:
            raise UnsupportedError(
                f"{name}: made of {error.args[0]}, which the snapshot does not have",
                next_step="Check that config.json belongs to these tensors.",
            ) from error
        if not isinstance(out, tracing.Traced):
            raise UnsupportedError(
                f"Bridge's {type(mapping).__name__} of {name} gives no tensor that could be followed"
            )
        if tuple(out.shape) == shape:
            return out
        if name.endswith(_VOCABULARY) and out.shape[1:] == shape[1:] and out.shape[0] < shape[0]:
            rows = pieces.of_source("", (shape[0] - out.shape[0], *shape[1:]))
            return tracing.Traced(pieces.concatenate([out.assembly, rows], 0), out.dtype)
        raise UnsupportedError(
            f"{name}: Megatron's tensor has shape {list(shape)}, but {mapping.hf_param} gives {list(out.shape)}",
            next_step="config.json and the tensors of the snapshot do not belong together.",
        )


def _plain(traced: tracing.Traced, roles: list[Any]) -> dict[str, Any]:
    assembly: Assembly = traced.assembly
    number = {name: i for i, name in enumerate(assembly.sources)}
    return {
        "shape": list(assembly.shape),
        "roles": roles,
        "pieces": [[p.offset, p.size, number.get(p.source, -1), p.first, p.strides] for p in assembly.pieces],
    }
