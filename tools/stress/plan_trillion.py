"""The plan for a model of a trillion parameters, index only: ``python tools/stress/plan_trillion.py [--small]``.

Makes the checkpoint that Megatron would have saved of a mixture of experts (256 experts, 96 layers) under TP 8, PP 16, EP 64:
its whole index, common state and objects; of its 14 TB of tensors only the files' lengths, as holes. Then plans it for other
layouts with ``ckptguard reshard --dry-run``, as a user would, and says how long each took and how much memory all its processes
had.
Bars: 60 s and 4 GiB.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckptguard.convert.reshard_prepare import prepare_reshard
from ckptguard.convert.resharding import ReshardOptions, ReshardPrepared
from ckptguard.core.boxes import whole
from ckptguard.core.dtypes import BY_NAME
from ckptguard.core.index import Chunk, FileEntry, Span, TensorEntry
from ckptguard.core.writing import Literal
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.structure import structures_for

SEED = Path(__file__).resolve().parents[2] / "fixtures" / "megatron-0.19" / "moe_pp2ep2_fully_reshardable"
LAYERS, EXPERTS = 96, 256
MODEL: dict[str, object] = {
    "num_layers": LAYERS, "encoder_num_layers": LAYERS, "hidden_size": 7168, "ffn_hidden_size": 18432,
    "num_attention_heads": 64, "group_query_attention": True, "num_query_groups": 8, "kv_channels": 128,
    "num_experts": EXPERTS, "moe_ffn_hidden_size": 2048, "moe_grouped_gemm": True, "vocab_size": 131071,
    "padded_vocab_size": 131072, "transformer_impl": "transformer_engine", "sequence_parallel": True,
}  # fmt: skip
SAVED = Layout(tp=8, pp=16, ep=64, etp=1)
TARGETS = (
    ["--tp", "4", "--pp", "8", "--ep", "32"],
    ["--tp", "8", "--pp", "12", "--ep", "32", "--optimizer", "dp_reshardable"],
)
SMALL = {"num_layers": 32, "encoder_num_layers": 32}


def make(path: Path, model: Mapping[str, object]) -> int:
    """Writes the checkpoint with holes for tensors; returns the number of its parameters."""
    (iteration,) = SEED.glob("iter_*")
    with open_checkpoint(iteration) as small:
        facts = small.index.facts
        args = {**facts.args, **model, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        args |= {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
        (structures,) = structures_for([(args, facts.content_metadata, None)])
        tensors = {}
        for prefix, dtype in (("", "bfloat16"), *((f"optimizer.state.{s}.", "float32") for s in _STATES)):
            for key, shape in structures.global_shapes.items():
                size_bytes = whole(shape).numel * BY_NAME[dtype].itemsize
                chunk = Chunk(whole(shape), Span(_HUGE, 0, size_bytes))
                tensors[prefix + key] = TensorEntry(prefix + key, BY_NAME[dtype], shape, (chunk,))
        files = {**small.index.files, _HUGE: FileEntry(_HUGE, 1 << 50)}
        objects = {n: blob for n, blob in small.index.objects.items() if "._extra_state/" not in n}
        index = replace(small.index, tensors=tensors, objects=objects, problems=(), files=files)
        options = ReshardOptions(layout=SAVED, optimizer="fully_reshardable", args={**args}, verify=False)
        _write(prepare_reshard(replace(small, index=index), options), path)
    return sum(whole(shape).numel for shape in structures.global_shapes.values())


_STATES = ("param", "exp_avg", "exp_avg_sq")
_HUGE = "__0_0.distcp"  # whatever its real size: nothing of it is read but objects


def _write(prepared: ReshardPrepared, path: Path) -> None:
    folder = path / prepared.folder
    folder.mkdir(parents=True)
    for file in prepared.write_plan.files:
        with (path / file.path).open("wb") as out:
            at = 0
            for part in file.parts:
                if isinstance(part, Literal) and at < (64 << 20):  # objects stand first
                    out.seek(at)
                    out.write(part.data)
                at += part.length_bytes
            out.truncate(file.size_bytes)
    for name, data in prepared.output.small.items():
        (folder / name).write_bytes(data)
    for name, data in prepared.root_files.items():
        (path / name).write_bytes(data)


def measure(path: Path, options: list[str]) -> tuple[float, float, dict[str, object]]:
    """(seconds, GiB of all processes at their peak, the plan) of a dry run."""
    command = [
        sys.executable,
        "-m",
        "ckptguard",
        "reshard",
        str(path),
        str(path) + "-new",
        *options,
        "--dry-run",
        "--json",
    ]
    with tempfile.TemporaryFile() as out:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=out)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _resident_bytes(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - begun
        out.seek(0)
        answer = json.load(out)
    return seconds, peak / 2**30, answer["plan"]


def _resident_bytes(pid: int) -> int:
    """Proportional set size of a process and its children."""
    total = 0
    for number in [pid, *_children(pid)]:
        try:
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [number for child in map(int, text.split()) for number in (child, *_children(child))]


def main() -> int:
    """Makes, plans, and says what it took; the exit code says whether both bars were kept."""
    model = MODEL | SMALL if "--small" in sys.argv else MODEL
    folder = Path(tempfile.mkdtemp(prefix="trillion-", dir=os.environ.get("TMPDIR")))
    kept = True
    try:
        parameters = make(folder / "saved", model)
        print(f"{parameters / 1e12:.2f} trillion parameters, saved under {SAVED}", flush=True)
        for options in TARGETS:
            if "--small" in sys.argv and "12" in options:
                continue
            seconds, peak, plan = measure(folder / "saved", options)
            files = plan["bytes_by_file"]
            assert isinstance(files, dict)
            print(
                f"reshard {' '.join(options)}: {plan['chunks']} chunks, {len(files)} files planned in {seconds:.1f} s"
                f" with {peak:.2f} GiB",
                flush=True,
            )
            kept = kept and seconds < 60 and peak < 4
    finally:
        shutil.rmtree(folder)
    print("within 60 s and 4 GiB" if kept else "NOT within 60 s and 4 GiB")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
