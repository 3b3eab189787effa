"""Small Hugging Face snapshots, one for each model family that Megatron's users import.

:func:`make_snapshot` writes a snapshot with the structure of a released model: its ``config.json``, its tensor names,
dtypes and quantised forms, in three safetensors files with an index. Sizes are tiny and values random, no two tensors
are equal but for those that a release repeats, and none is constant, so that a swapped, dropped or half-written tensor
shows. Nothing heavy is imported before a snapshot is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ckptguard.testing import family_configs as configs

if TYPE_CHECKING:
    from ckptguard.testing.family_tensors import Tensors

SHARDS = 3
Nextn = Literal["none", "layer", "v4"]
Quantised = Literal["none", "fp8", "mxfp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes that a family's heads, experts and layers allow.

    Attributes:
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size.
        etp: Expert tensor parallel size; None is Megatron's default, ``tp``.
        vpp: Virtual stages per pipeline rank; 1 is none.
        first_stage_layers: Layers on the first stage; None is an even split.
        last_stage_layers: Layers on the last stage; None is an even split.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def world_size(self) -> int:
        """Processes of the smallest world with every model-parallel rank: TP x PP, but for experts ETP x EP x PP."""
        return self.pp * lcm(self.tp, (self.etp or self.tp) * self.ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family at small size.

    Attributes:
        name: What tests call it.
        config: Content of ``config.json``.
        layout: One to import to: as many axes as the model has room for.
        nextn: How a release names its layer that predicts one token further: ``layer`` is one more
            ``model.layers.N``, ``v4`` is ``mtp.0``.
        quantised: The form in which the release keeps its large matrices.
        forward_on_cpu: Whether Megatron's local spec can run it without kernels.
        bridge: Whether Megatron-Bridge 0.6.2 takes the snapshot: it has no bridge for Mixtral, and reads a config of
            type ``kimi_k2`` only with the code that a release brings along.
        megatron_lm: Whether Megatron-LM builds the model from its own arguments; the others need Bridge's provider.
        core: Whether Megatron Core 0.19.2 has this model at all. It puts a norm into ``linear_q_proj`` of MLA without
            q-LoRA that DeepSeek-V2-Lite does not have (``QKNormConfigResolver``), and knows no ``dsv4_hybrid``.
    """

    name: str
    config: configs.Config
    layout: Layout
    nextn: Nextn = "none"
    quantised: Quantised = "none"
    forward_on_cpu: bool = False
    bridge: bool = True
    megatron_lm: bool = True
    core: bool = True

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, before any padding."""
        return int(self.config["vocab_size"])

    @property
    def num_layers(self) -> int:
        """Decoder layers, without those that predict further tokens."""
        return int(self.config["num_hidden_layers"])


_ALL = (
    Family(name="llama", config=configs.LLAMA, layout=Layout(tp=2, pp=2, vpp=2), forward_on_cpu=True),
    Family(name="llama31", config=configs.LLAMA31, layout=Layout(tp=2, pp=2), forward_on_cpu=True),
    Family(name="qwen2", config=configs.QWEN2, layout=Layout(tp=2, pp=2), forward_on_cpu=True),
    Family(
        name="qwen3", config=configs.QWEN3, layout=Layout(tp=2, pp=3, first_stage_layers=1, last_stage_layers=2),
        forward_on_cpu=True,
    ),
    Family(name="qwen3_moe", config=configs.QWEN3_MOE, layout=Layout(tp=2, pp=2, ep=2, etp=1), forward_on_cpu=True),
    Family(name="mixtral", config=configs.MIXTRAL, layout=Layout(tp=2, pp=2, ep=2, etp=1), forward_on_cpu=True,
           bridge=False),
    Family(name="gpt_oss", config=configs.GPT_OSS, layout=Layout(tp=2, pp=2, ep=2, etp=1), forward_on_cpu=True),
    Family(name="gpt_oss_mxfp4", config=configs.GPT_OSS_MXFP4, layout=Layout(pp=2, ep=2), quantised="mxfp4"),
    Family(
        name="gemma3", config=configs.GEMMA3, layout=Layout(tp=2, pp=2, first_stage_layers=3, last_stage_layers=4),
        megatron_lm=False,
    ),
    Family(
        name="deepseek_v2_lite", config=configs.DEEPSEEK_V2_LITE,
        layout=Layout(tp=2, pp=2, ep=2, etp=1, first_stage_layers=3, last_stage_layers=2), core=False,
    ),
    Family(
        name="deepseek_v3", config=configs.DEEPSEEK_V3, nextn="layer",
        layout=Layout(tp=2, pp=2, ep=2, etp=1, first_stage_layers=3, last_stage_layers=1),
    ),
    Family(
        name="deepseek_v3_fp8", config=configs.DEEPSEEK_V3_FP8, layout=Layout(tp=2, ep=2, etp=1), nextn="layer",
        quantised="fp8",
    ),
    Family(name="kimi_k2", config=configs.KIMI_K2, layout=Layout(tp=2, pp=2, ep=2, etp=1), bridge=False),
    Family(name="deepseek_v4", config=configs.DEEPSEEK_V4, layout=Layout(ep=2, etp=1), nextn="v4", core=False),
    Family(
        name="glm4_moe", config=configs.GLM4_MOE, layout=Layout(tp=2, pp=2, ep=2, etp=1), nextn="layer",
        forward_on_cpu=True,
    ),
    Family(
        name="glm4_moe_air", config=configs.GLM4_MOE_AIR, layout=Layout(tp=2, ep=4, etp=1), nextn="layer",
        forward_on_cpu=True,
    ),
    Family(name="nemotron_h", config=configs.NEMOTRON_H, layout=Layout(tp=2, pp=2, ep=2, etp=1)),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
"""Every family, by name."""


def make_tensors(family: Family) -> Tensors:
    """All tensors of a family's snapshot, by their names in it."""
    from ckptguard.testing import family_tensors

    shapes = family_tensors.shapes_of(family.config)
    hidden, layers = int(family.config["hidden_size"]), family.num_layers
    if family.nextn == "layer":
        shapes |= family_tensors.nextn_shapes(shapes, layers, hidden)
    elif family.nextn == "v4":
        shapes |= family_tensors.v4_nextn_shapes(shapes, hidden)
    tensors = family_tensors.fill(shapes, experts=int(family.config.get("n_routed_experts", 0)))
    if family.nextn == "layer":
        tensors |= family_tensors.copies_of_ends(tensors, layers)
    if family.quantised == "fp8":
        return family_tensors.to_fp8_blocks(tensors)
    return family_tensors.to_mxfp4(tensors) if family.quantised == "mxfp4" else tensors


def make_snapshot(name: str, out: Path) -> Path:
    """Write a family's snapshot: configs, a tokenizer, three safetensors files cut at no layer's end, and their index.

    Args:
        name: One of :data:`FAMILIES`.
        out: The directory to fill; made if it is not there.

    Returns:
        ``out``.
    """
    from safetensors.torch import save_file

    family = FAMILIES[name]
    tensors = make_tensors(family)
    out.mkdir(parents=True, exist_ok=True)
    ordered = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        names = ordered[len(ordered) * shard // SHARDS : len(ordered) * (shard + 1) // SHARDS]
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file({n: tensors[n] for n in names}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(out / "config.json", dict(family.config))
    _write_json(out / "tokenizer.json", _tokenizer(family.vocab_size))
    _write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_json(out / "generation_config.json", {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2})
    return out


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """The smallest ``tokenizer.json``: words between spaces, ``t0`` to the last of the vocabulary."""
    vocab = {f"t{number}": number for number in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model, **rest}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
