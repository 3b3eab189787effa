"""Real launch lines, proved by ``ckptguard verify-resume`` as a user would: each has to be equal, or red with a known issue.

    python tools/stress/resume_real.py [NAME...] [--list] [--snapshot DIR] [--work DIR]

The scripts are ``tests/resume/pretrain_gpt.py`` (Megatron-LM) and ``tests/resume/pretrain_bridge.py`` (Megatron-Bridge), on
gloo processes of this machine's CPUs. The control model is the one that resumes are tested with elsewhere: 4 layers, hidden
size 256, FFN 512. SmolLM2 starts from its imported weights (``tools/smollm2_snapshot.py`` makes the snapshot). Exits 1 if a
run is not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptguard.testing.cpu_stand_in import site_directory
from ckptguard.testing.recipes import CPU_FLAGS

ROOT = Path(__file__).resolve().parents[2]
EXPERT_RNG = "NVIDIA/Megatron-LM#6858"
_ARM_TIMEOUT = 1800
_IMPORTED = "imported"  # SmolLM2's weights, in the scratch folder
_COMMON = """--micro-batch-size 1 --lr 1e-3 --lr-decay-iters 100 --train-iters 100 --lr-decay-style cosine
--eval-iters 0 --eval-interval 1000 --log-interval 1 --bf16 --use-distributed-optimizer --tokenizer-type NullTokenizer"""
_DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
_SHAPE = """--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
--untie-embeddings-and-output-weights"""
_SMALL = f"""{_SHAPE} --num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32
--max-position-embeddings 32"""
_CONTROL = f"""{_SHAPE} --num-layers 4 --hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 512 --seq-length 64
--max-position-embeddings 64"""
_EXPERTS = """--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 256
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"""
_MOCK = "--mock-data --vocab-size 511"


def _axes(tp: int = 1, pp: int = 1, more: str = "") -> str:
    return f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One launch line.

    Attributes:
        name: What it is called here.
        ranks: Processes.
        flags: Of the script.
        data: ``mock``, ``text`` (fixtures/text) or, for Bridge, which has its own, empty.
        script: Which.
        steps: Of the reference.
        save_at: As the option.
        smollm2: Starts from SmolLM2's imported weights.
        from_view: Checkpoints are loaded from a view of their directory (``--node-local``).
        known: Public issue with which it has to be red.
    """

    name: str
    ranks: int
    flags: str
    data: str = "mock"
    script: str = "pretrain_gpt.py"
    steps: int = 6
    save_at: str = "3"
    smollm2: bool = False
    from_view: bool = False
    known: str | None = None


RUNS = (
    Run(name="mock-tp2", ranks=2, flags=f"{_SMALL} --global-batch-size 4 {_axes(2)} {_DROPOUT}"),
    Run(name="mock-tp2-pp2", ranks=4, flags=f"{_SMALL} --global-batch-size 4 {_axes(2, 2)} {_DROPOUT}"),
    Run(name="text-tp2-pp2", ranks=4, flags=f"{_SMALL} --global-batch-size 4 {_axes(2, 2)} {_DROPOUT}", data="text"),
    Run(
        name="text-pp2-vpp2", ranks=2, data="text",
        flags=f"{_SMALL} --global-batch-size 4 {_axes(1, 2, '--num-virtual-stages-per-pipeline-rank 2')} {_DROPOUT}",
    ),
    Run(name="text-dp2-overlap", ranks=2, data="text",
        flags=f"{_SMALL} --global-batch-size 4 --overlap-grad-reduce --overlap-param-gather {_DROPOUT}"),
    Run(name="text-evaluated", ranks=1, data="text", save_at="2,4",
        flags=f"{_SMALL} --global-batch-size 2 --split 9,1,0 --eval-interval 2 --eval-iters 1 {_DROPOUT}"),
    Run(name="smollm2", ranks=1, data="text", steps=4, save_at="2", smollm2=True,
        flags="--use-checkpoint-args --seq-length 64 --max-position-embeddings 8192 --global-batch-size 2 --lr 1e-5"),
    Run(name="control-8", ranks=8, flags=f"{_CONTROL} --global-batch-size 8 {_axes(2, 2)} {_DROPOUT}", data="text"),
    Run(name="control-16", ranks=16, steps=20, save_at="10",
        flags=f"{_CONTROL} --global-batch-size 16 {_axes(2, 2)} {_DROPOUT}"),
    Run(
        name="control-experts-8", ranks=8, known=EXPERT_RNG,
        flags=f"{_CONTROL} {_EXPERTS} --global-batch-size 8 {_DROPOUT} "
        + _axes(2, 2, "--sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"),
    ),
    Run(
        name="control-experts-16", ranks=16, steps=20, save_at="10", known=EXPERT_RNG,
        flags=f"{_CONTROL} {_EXPERTS} --global-batch-size 16 {_DROPOUT} "
        + _axes(2, 2, "--sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"),
    ),
    Run(name="view-tp2-pp2", ranks=4, flags=f"{_SMALL} --global-batch-size 4 {_axes(2, 2)} {_DROPOUT}", from_view=True),
    Run(
        name="view-bridge-tp2", ranks=2, script="pretrain_bridge.py", data="", from_view=True,
        flags="model.tensor_model_parallel_size=2",
    ),
    Run(name="bridge-tp2", ranks=2, script="pretrain_bridge.py", data="", flags="model.tensor_model_parallel_size=2"),
    Run(
        name="bridge-experts", ranks=2, script="pretrain_bridge.py", data="",
        flags="model.num_moe_experts=4 model.expert_model_parallel_size=2 model.moe_token_dispatcher_type=alltoall",
    ),
)  # fmt: skip


def line_of(run: Run, scratch: Path) -> list[str]:
    """The launch line; Megatron's index of the text and SmolLM2's weights are in the scratch folder."""
    flags = run.flags
    if run.script == "pretrain_gpt.py":
        text = (
            f"--data-path {ROOT / 'fixtures/text/the_ferry'} --data-cache-path {scratch / 'index'} --vocab-size 49152"
        )
        split = "" if "--split" in flags else "--split 1"
        flags = f"{shlex.join(CPU_FLAGS)} {_COMMON} {flags} {_MOCK if run.data == 'mock' else f'{text} {split}'}"
    if run.smollm2:
        flags += f" --pretrained-checkpoint {scratch / _IMPORTED}"
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {run.ranks}"
    return [sys.executable, *shlex.split(f"{torchrun} {ROOT / 'tests/resume' / run.script} {flags}")]


def prove(run: Run, scratch: Path, work: Path) -> tuple[dict[str, Any], str]:
    """What ``verify-resume`` says, as its JSON, and why that is not as expected; empty if it is."""
    command = [sys.executable, "-m", "ckptguard", "verify-resume", "--json", "--steps", str(run.steps)]
    command += ["--save-at", run.save_at, "--work", str(work), "--arm-timeout", str(_ARM_TIMEOUT)]
    command += ["--framework", "bridge" if run.script == "pretrain_bridge.py" else "megatron-lm"]
    if run.from_view:
        command += ["--node-local", "--checkpoints", str(scratch / f"{run.name}-local")]
    environment = os.environ | {"PYTHONPATH": f"{site_directory()}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--", *line_of(run, scratch)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        found = {}
    if "word" not in found:
        return {}, f"exit {done.returncode}: {(done.stdout + done.stderr).strip()[-500:]}"
    issues = [fault["issue"] for fault in found["known"]]
    if run.known is None:
        return found, "" if (found["word"], done.returncode) == ("equal", 0) else found["sentence"]
    red = (found["word"], done.returncode, run.known in issues) == ("different", 3, True)
    return found, "" if red else f"{run.known} expected, named {issues}: {found['sentence']}"


def import_smollm2(snapshot: Path, into: Path) -> None:
    """Imports the snapshot for one rank."""
    if not into.exists():
        subprocess.run([sys.executable, "-m", "ckptguard", "import", str(snapshot), str(into)], check=True, cwd=ROOT)


def main() -> int:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="show the launch lines and end")
    parser.add_argument("--snapshot", type=Path, default=ROOT / ".demo" / "smollm2", help="default: .demo/smollm2")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep what the arms recorded and saved")
    chosen = parser.parse_args()
    known = {run.name: run for run in RUNS}
    if unknown := set(chosen.names) - known.keys():
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    runs = [known[name] for name in chosen.names] or list(RUNS)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = (chosen.work or Path(folder)).absolute()
        for run in runs:
            if chosen.list:
                print(f"{run.name}: {shlex.join(line_of(run, scratch))}\n")
                continue
            if run.smollm2:
                import_smollm2(chosen.snapshot.absolute(), scratch / _IMPORTED)
            since = time.monotonic()
            found, problem = prove(run, scratch, scratch / run.name)
            wrong += bool(problem)
            print(
                f"{run.name:20} {run.ranks:2} ranks  {_told(run, found)}, {time.monotonic() - since:.0f} s", flush=True
            )
            if problem:
                print(f"    {problem}", flush=True)
    return 1 if wrong else 0


def _told(run: Run, found: dict[str, Any]) -> str:
    if not found:
        return "nothing was told"
    values = sum(comparison["values"] for comparison in found["comparisons"])
    arms = ", ".join(f"{arm['name']} {arm['seconds']:.0f} s" for arm in found["arms"])
    issue = f" ({run.known})" if run.known in [fault["issue"] for fault in found["known"]] else ""
    stored = f"{found['stored_bytes_per_rank_step'] / 1024:.1f} KiB a rank and step"
    return f"{found['word']}{issue}, {values:,} values; {arms}; {stored}"


if __name__ == "__main__":
    sys.exit(main())
