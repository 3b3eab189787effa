"""Llama-shaped Hugging Face snapshots of any size: a real config.json, random bf16 weights, shards of 1 GiB.

python tools/benchmarks/make_snapshots.py OUT_DIR --size 4GiB
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARD_BYTES = 1 << 30
_NAME = "model-{:05d}-of-{:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama; ``layers`` is always even, so that two pipeline stages can share them.

    Attributes:
        hidden: Width of the residual stream.
        ffn: Width of the MLP.
        vocabulary: Rows of the embedding, and of the output layer.
        layers: Number of layers.
    """

    hidden: int
    ffn: int
    vocabulary: int
    layers: int

    @property
    def heads(self) -> int:
        """Query heads of 64 elements; a quarter as many for keys and for values."""
        return self.hidden // 64

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name, in the order of a released snapshot."""
        hidden, groups = self.hidden, self.hidden // 4
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for number in range(self.layers):
            layer = {
                "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (groups, hidden),
                "self_attn.v_proj": (groups, hidden),
                "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (self.ffn, hidden), "mlp.up_proj": (self.ffn, hidden),
                "mlp.down_proj": (hidden, self.ffn), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            }  # fmt: skip
            out |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        return out | {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocabulary, hidden)}

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "vocab_size": self.vocabulary,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.heads // 4,
            "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
            "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
            "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
            "transformers_version": "4.55.0",
        }  # fmt: skip


def shape_of(size_bytes: int) -> Shape:
    """A Llama of about that many bytes: the widths of a released model of that size, layers as many as fit."""
    hidden, ffn, vocabulary = next(
        sizes
        for least, *sizes in (
            (6 << 30, 4096, 14336, 128256),
            (1 << 30, 2048, 8192, 32000),
            (64 << 20, 1024, 4096, 8192),
            (0, 256, 1024, 2048),
        )
        if size_bytes >= least
    )
    layer_bytes = 2 * (2 * hidden * hidden + 2 * hidden * hidden // 4 + 3 * hidden * ffn)
    layers = (size_bytes - 2 * 2 * vocabulary * hidden) / layer_bytes
    return Shape(hidden, ffn, vocabulary, max(2, round(layers / 2) * 2))


def make(path: Path, size_bytes: int, *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Writes a snapshot, if it is not there; memory holds one shard at a time.

    Args:
        path: The directory; it appears by a rename once it is whole.
        size_bytes: About how large.
        shard_bytes: Most bytes of tensors in a file.
    """
    if path.exists():
        return path
    import numpy as np
    import torch
    from safetensors.torch import save_file

    shape = shape_of(size_bytes)
    rng = np.random.default_rng(0)
    partial = path.with_name(f"{path.name}.making")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    shards = list(_shards(shape.tensors(), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = _NAME.format(number, len(shards))
        tensors = {}
        for name, size in names.items():
            words = np.frombuffer(rng.bytes(2 * int(np.prod(size))), np.uint16) & np.uint16(0xBFFF)  # no inf, no nan
            tensors[name] = torch.from_numpy(words).view(torch.bfloat16).reshape(size)
        save_file(tensors, partial / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(file.stat().st_size for file in partial.iterdir())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (partial / "config.json").write_text(json.dumps(shape.config(), indent=2))
    partial.rename(path)
    return path


def _shards(tensors: dict[str, tuple[int, ...]], shard_bytes: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Cuts a list of tensors into files, in order; no tensor is cut."""
    shard: dict[str, tuple[int, ...]] = {}
    used = 0
    for name, size in tensors.items():
        length = 2
        for n in size:
            length *= n
        if shard and used + length > shard_bytes:
            yield shard
            shard, used = {}, 0
        shard[name] = size
        used += length
    yield shard


def size_in_bytes(text: str) -> int:
    """Bytes of ``4GiB``, ``256MiB`` or a number; for command lines."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20}
    for unit, factor in units.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    return int(text)


def main() -> None:
    """Parses the command line and makes a snapshot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument(
        "--size", type=size_in_bytes, default=size_in_bytes("4GiB"), help="such as 256MiB (default: 4GiB)"
    )
    options = parser.parse_args()
    print(make(options.out_dir, options.size))


if __name__ == "__main__":
    main()
