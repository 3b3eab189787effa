"""Megatron ``torch_dist`` checkpoints of any size, without training: a frozen tiny one, its model made wider and deeper.

    python tools/benchmarks/make_megatron.py OUT_DIR --size 8GiB --tp 2 --pp 2

The model is shaped like a Llama, with bf16 weights and AdamW's three fp32 states: 14 bytes a parameter. Args, common state and
objects are those that Megatron-LM 0.19 stored in the frozen checkpoint, with other numbers; which tensors there are and where
they belong is what Megatron says of these args; the elements are random. ``recipe`` is the same model for Megatron processes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from make_snapshots import Shape, shape_of, size_in_bytes

from ckptguard.convert.reshard_prepare import prepare_reshard
from ckptguard.convert.resharding import OptimizerChoice, ReshardOptions, run_reshard
from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME, DType
from ckptguard.core.index import Chunk, Span, TensorEntry
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.structure import structures_for
from ckptguard.testing.recipes import OptimizerFormat, Recipe

SEED = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19" / "dense_tp2pp2_dp_reshardable"
BYTES_PER_PARAMETER = 14
_STATES = ("param", "exp_avg", "exp_avg_sq")
_RANDOM = "__99_0.distcp"
_SPREAD_BYTES = 32 << 20
_STEP_BYTES = 1_048_592  # of 16 more than a MiB, so that no two chunks hold the same


def model_of(size_bytes: int) -> Shape:
    """The model whose checkpoint, optimizer included, has about that many bytes."""
    return shape_of(size_bytes * 2 // BYTES_PER_PARAMETER)


def args_of(shape: Shape) -> dict[str, object]:
    """The training args that say the model; the others are the frozen checkpoint's."""
    return {
        "num_layers": shape.layers, "encoder_num_layers": shape.layers, "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn, "num_attention_heads": shape.heads, "group_query_attention": True,
        "num_query_groups": shape.heads // 4, "kv_channels": 64, "vocab_size": shape.vocabulary - 1,
        "padded_vocab_size": shape.vocabulary, "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False,
        "add_qkv_bias": False,
        "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True,
    }  # fmt: skip


def recipe(size_bytes: int, *, tp: int, pp: int, dp: int = 1, optimizer: OptimizerFormat) -> Recipe:
    """The same model in a layout, for ``ckptguard.testing.recipes.resave``."""
    shape = model_of(size_bytes)
    flags = {
        "hidden-size": shape.hidden, "ffn-hidden-size": shape.ffn, "num-attention-heads": shape.heads,
        "num-query-groups": shape.heads // 4, "vocab-size": shape.vocabulary - 1,
    }  # fmt: skip
    extra = tuple(word for name, value in flags.items() for word in (f"--{name}", str(value)))
    extra += ("--use-checkpoint-opt_param-scheduler",)  # the frozen run was of another length
    return Recipe(
        name="benchmark", tp=tp, pp=pp, dp=dp, num_layers=shape.layers, optimizer_format=optimizer, extra_flags=extra
    )


def make(path: Path, size_bytes: int, *, layout: Layout, optimizer: OptimizerChoice = "fully_reshardable") -> Path:
    """Writes a checkpoint, if it is not there; it is not sealed.

    Args:
        path: The root; it appears once it is whole.
        size_bytes: About how large.
        layout: In which it is saved.
        optimizer: The form of its optimizer state.
    """
    if path.exists():
        return path
    args = args_of(model_of(size_bytes))
    options = ReshardOptions(layout=layout, optimizer=optimizer, args=args, verify=False)
    for left in path.parent.glob(f"{path.name}.making*"):
        shutil.rmtree(left)
    making = path.with_name(f"{path.name}.making")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        (iteration,) = SEED.glob("iter_*")
        folder = Path(shutil.copytree(iteration, Path(scratch) / iteration.name))
        (folder / _RANDOM).touch()
        with open_checkpoint(folder) as small:
            content = small.index.facts.content_metadata
            (structures,) = structures_for([({**small.index.facts.args, **args}, content, None)])
        tensors = _tensors(structures.global_shapes)
        _write_random(folder / _RANDOM, max(c.span.end_bytes for entry in tensors.values() for c in entry.chunks))
        with open_checkpoint(folder) as small:
            grown = _grown(small, tensors)
            run_reshard(prepare_reshard(grown, options), making, options, what=f"making of {path.name}")
    for manifest in making.rglob(FILE_NAME):
        manifest.unlink()
    making.rename(path)
    return path


def _tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    """Weights and their optimizer states; the layers of each are somewhere in one file of random elements, and overlap."""
    kinds: list[tuple[str, DType]] = [("", BY_NAME["bfloat16"])]
    kinds += [(f"optimizer.state.{state}.", BY_NAME["float32"]) for state in _STATES]
    out, number = {}, 0
    for prefix, dtype in kinds:
        for key, shape in shapes.items():
            layers = shape[0] if key.startswith("decoder.layers.") else 1
            size = (shape[0] // layers, *shape[1:])
            chunks = []
            for layer in range(layers):
                box = Box((layer, *(0 for _ in size[1:])), size)
                number += 1
                at = number * _STEP_BYTES % _SPREAD_BYTES
                chunks.append(Chunk(box, Span(_RANDOM, at, box.numel * dtype.itemsize)))
            out[prefix + key] = TensorEntry(prefix + key, dtype, shape, tuple(chunks))
    return out


def _write_random(path: Path, size_bytes: int) -> None:
    """Fills a file with elements that are neither infinite nor NaN as bf16 or fp32."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for begin in range(0, size_bytes, _SPREAD_BYTES):
            data = rng.bytes(-(-min(_SPREAD_BYTES, size_bytes - begin) // 2) * 2)
            file.write((np.frombuffer(data, np.uint16) & np.uint16(0xBFFF)).data)


def _grown(small: Checkpoint, tensors: Mapping[str, TensorEntry]) -> Checkpoint:
    """The frozen checkpoint with other tensors, and so with state beside each model tensor instead of in buckets."""
    facts = replace(small.index.facts, optimizer_format="fully_reshardable")
    objects = {name: blob for name, blob in small.index.objects.items() if "._extra_state/" not in name}
    return replace(small, index=replace(small.index, tensors=tensors, objects=objects, facts=facts, problems=()))


def main() -> None:
    """Parses the command line and makes a checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--size", type=size_in_bytes, default=size_in_bytes("8GiB"), help="such as 256MiB (8GiB)")
    for axis in ("tp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--optimizer", default="fully_reshardable", choices=["fully_reshardable", "dp_reshardable"])
    options = parser.parse_args()
    layout = Layout(tp=options.tp, pp=options.pp, dp=options.dp)
    print(make(options.out_dir, options.size, layout=layout, optimizer=options.optimizer))


if __name__ == "__main__":
    main()
