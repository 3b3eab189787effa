"""The tensors of a small snapshot: names and shapes from transformers, values from a generator seeded by the name.

What transformers leaves out of its models, and released snapshots have, is added here: the layers that predict further
tokens (MTP), and the two quantised forms, fp8 in blocks of 128 x 128 and MXFP4.
"""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

FP8_BLOCK = 128
_FP8_MAX = 448.0
_MXFP4_BLOCK = 32

# What stays in fp32 in released bf16 snapshots: the router's correction of DeepSeek-V3, GLM-4.5 and Nemotron 3, and
# in DeepSeek-V4 the hyper-connections, the sinks and the position biases of the compressors too.
_FLOAT32 = re.compile(r"e_score_correction_bias$|ffn\.gate\.bias$|hc_\w+_(fn|base|scale)$|attn_sink$|\.ape$")
_QUANTISED = re.compile(
    r"\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|gate_proj|up_proj|down_proj)\.weight$"
)

# Where the saving of transformers 5.12 does not come back to the names it reads. DeepSeek-V4: the renames are made
# before the prefix of the inner model goes, so most do not match.
_RELEASED: dict[str, tuple[tuple[str, str], ...]] = {
    "nemotron_h": ((r"^backbone\.embedding\.", "backbone.embeddings."),),
    "deepseek_v4": (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.mlp\.", ".ffn."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.compressor\.indexer\.(kv_norm|kv_proj|gate_proj|position_bias)", r".indexer.compressor.\1"),
        (r"\.compressor\.indexer\.", ".indexer."),
        (r"\.indexer\.scorer\.", ".indexer."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.kv_proj\.", ".compressor.wkv."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.position_bias$", ".ape"),
        (r"\.self_attn\.q_a_norm\.", ".self_attn.q_norm."),
        (r"\.self_attn\.sinks$", ".self_attn.attn_sink"),
        (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
        (r"\.self_attn\.kv_proj\.", ".self_attn.wkv."),
        (r"\.self_attn\.", ".attn."),
    ),
}


def random(name: str, shape: tuple[int, ...], *, vocabulary_of_experts: int = 0) -> torch.Tensor:
    """A tensor that no other equals and whose elements differ from each other, with values a model could have.

    Args:
        name: The tensor's name: seeds the generator, and says which values are usual.
        shape: Its shape.
        vocabulary_of_experts: For a table from token to experts, the number of experts.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    generator = torch.Generator().manual_seed(seed)
    if name.endswith("tid2eid"):
        return torch.rand(shape[0], vocabulary_of_experts, generator=generator).argsort(-1)[:, : shape[1]].contiguous()
    values = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        out = values.abs().add(1).log()
    elif "norm" in name or name.endswith((".D", "_scale")):
        out = 1 + 0.1 * values
    elif name.endswith("bias") or len(shape) < 2:
        out = 0.1 * values
    else:
        out = values / math.sqrt(shape[-1])
    return out.to(torch.float32 if _FLOAT32.search(name) else torch.bfloat16)


def fill(shapes: Shapes, *, experts: int = 0) -> Tensors:
    """Random values for every name."""
    return {name: random(name, shape, vocabulary_of_experts=experts) for name, shape in shapes.items()}


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors that transformers saves for a config, in the names of released snapshots."""
    import transformers

    model_type = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    left_out = {"model_type", "auto_map", "quantization_config", "transformers_version"}
    kept = {name: value for name, value in config.items() if name not in left_out}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **kept))
    with tempfile.TemporaryDirectory() as scratch:
        from safetensors import safe_open

        model.save_pretrained(scratch)
        with safe_open(Path(scratch) / "model.safetensors", framework="pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return {released_name(config["model_type"], name): shape for name, shape in shapes.items()}


def released_name(model_type: str, name: str) -> str:
    """The released name of a tensor that transformers 5.12 saves under a name of its own."""
    for pattern, replacement in _RELEASED.get(model_type, ()):
        name = re.sub(pattern, replacement, name)
    return name


def nextn_shapes(shapes: Shapes, layers: int, hidden: int) -> Shapes:
    """The layer after the last one, which predicts one token further, in the names of DeepSeek-V3 and GLM-4.5.

    Released snapshots hold it as one more ``model.layers.N``: a layer as the one before it, three norms and a
    projection of its own, and copies of the embedding and of the output layer.

    Args:
        shapes: Of the model without it.
        layers: Number of decoder layers, which is the number of the added one.
        hidden: Hidden size.
    """
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    out = {name.replace(last, new): shape for name, shape in shapes.items() if name.startswith(last)}
    out |= {f"{new}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return out | {f"{new}eh_proj.weight": (hidden, 2 * hidden)}


def v4_nextn_shapes(shapes: Shapes, hidden: int) -> Shapes:
    """DeepSeek-V4's ``mtp.0``: the first layer's attention, which compresses nothing, and the last layer's experts.

    Args:
        shapes: Of the model without it.
        hidden: Hidden size.
    """
    last = max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
    first, mixture = "layers.0.", f"layers.{last}.ffn"
    out = {name.replace(first, "mtp.0."): shape for name, shape in shapes.items() if name.startswith(f"{first}attn")}
    out |= {name.replace(f"layers.{last}.", "mtp.0."): s for name, s in shapes.items() if name.startswith(mixture)}
    out |= {name.replace(first, "mtp.0."): shape for name, shape in shapes.items() if name.startswith(f"{first}hc_")}
    out |= {f"mtp.0.{name}": shape for name, shape in shapes.items() if name.startswith("hc_head_")}
    out |= {f"mtp.0.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    return out | {f"mtp.0.{name}.weight": (hidden, hidden) for name in ("e_proj", "h_proj")}


def copies_of_ends(tensors: Tensors, layers: int) -> Tensors:
    """What a released MTP layer repeats from the model: its embedding and its output layer."""
    return {
        f"model.layers.{layers}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"model.layers.{layers}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }


def to_fp8_blocks(tensors: Tensors) -> Tensors:
    """Quantise the linear weights as DeepSeek-V3 is released: e4m3, and ``_scale_inv`` in fp32 for each block."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not _QUANTISED.search(name):
            out[name] = tensor
            continue
        rows, columns = (-(-size // FP8_BLOCK) for size in tensor.shape)
        padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
        padded[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
        blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
        scales = blocks.abs().amax(dim=(1, 3)) / _FP8_MAX
        quantised = (blocks / scales[:, None, :, None]).view_as(padded)[: tensor.shape[0], : tensor.shape[1]]
        out[name] = quantised.to(torch.float8_e4m3fn).contiguous()
        out[f"{name}_scale_inv"] = scales
    return out


def to_mxfp4(tensors: Tensors) -> Tensors:
    """Put the experts' weights in GPT-OSS's released form: ``_blocks`` of two fp4 values a byte, and ``_scales``.

    Any bytes are fp4 values. A block of 32 values lies along the input, so ``gate_up_proj`` of shape [experts, hidden,
    2 x inner] becomes [experts, 2 x inner, hidden / 32, 16], and each scale is a power of two, stored plus 127.
    """
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        generator = torch.Generator().manual_seed(seed)
        shape = (experts, outputs, inputs // _MXFP4_BLOCK)
        half = _MXFP4_BLOCK // 2
        out[f"{name}_blocks"] = torch.randint(0, 256, (*shape, half), generator=generator, dtype=torch.uint8)
        out[f"{name}_scales"] = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
    return out
