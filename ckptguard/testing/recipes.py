"""Recipes for real, tiny Megatron checkpoints, and the functions that follow them.

:func:`make_checkpoint` trains a model for a few steps with Megatron-LM's own ``pretrain`` on CPU processes and returns
what it saved. :func:`resave` has Megatron load a checkpoint under another layout or format and save it again at once,
so that one state exists in many forms; :func:`check_loads` has Megatron load it and nothing more. One set of flags
serves all three. Nothing here imports torch, so that a test session which finds its checkpoints in a cache starts fast.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

Model = Literal["dense", "moe", "hybrid"]
OptimizerFormat = Literal["dp_reshardable", "fully_reshardable"]
CkptFormat = Literal["torch_dist", "torch", "torch_dcp"]

TRAINER = "ckptguard.testing.tiny_trainer"
_TRAINER_SOURCES = ("tiny_trainer.py", "cpu_stand_in.py", "hybrid_cpu.py")
TIMEOUT_SECONDS = 300.0
_LOG_LINES_SHOWN = 40
_SECONDS_TO_STOP = 15.0  # torchrun ends its ranks when it is asked to; a killed torchrun would leave them behind

CPU_FLAGS = tuple(
    shlex.split("""--transformer-impl local --attention-backend unfused --distributed-backend gloo
--use-cpu-initialization
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-persist-layer-norm --no-gradient-accumulation-fusion --disable-jit-fuser --num-workers 0""")
)
"""What Megatron-LM's command line needs on a machine without a GPU, beside the stand-in."""

_COMMON_FLAGS = tuple(
    shlex.split("""--hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups
2 --seq-length 32
    --max-position-embeddings 32 --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 511 --mock-data
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-iters 100 --lr-decay-style constant --eval-iters 0
    --eval-interval 1000 --log-interval 1 --use-distributed-optimizer""")
)
_MODEL_FLAGS: dict[Model, tuple[str, ...]] = {
    "dense": tuple(shlex.split("--position-embedding-type rope --swiglu --ffn-hidden-size 128")),
    "moe": tuple(
        shlex.split("""--position-embedding-type rope --swiglu --ffn-hidden-size 128 --num-experts 4
    --moe-ffn-hidden-size 64
        --moe-router-topk 2 --moe-token-dispatcher-type alltoall""")
    ),
    "hybrid": tuple(
        shlex.split("""--position-embedding-type none --squared-relu --ffn-hidden-size 128 --mamba-state-dim
    16 --mamba-head-dim 16
        --mamba-num-groups 2 --disable-mamba-mem-eff-path""")
    ),
}


class MegatronRunError(RuntimeError):
    """A Megatron process failed or ran too long; the message ends with the last lines it printed."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One tiny model under one layout, and the form in which it is saved.

    Attributes:
        name: What tests call it.
        model: ``dense`` and ``moe`` are GPT models, ``hybrid`` has Mamba, attention and MLP layers.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        dp: Data parallel size; ``tp * pp * dp`` processes are started.
        ep: Expert parallel size, a divisor of ``tp * dp``.
        etp: Expert tensor parallel size; None is Megatron's default, ``tp``.
        vpp: Virtual stages per pipeline rank; 1 is none.
        num_layers: Decoder layers in all.
        first_stage_layers: Layers on the first stage; None is an even split.
        last_stage_layers: Layers on the last stage; None is an even split.
        optimizer_format: ``distrib_optim_sharding_type`` of a ``torch_dist`` checkpoint.
        ckpt_format: Megatron's ``--ckpt-format``.
        dtype: Of the model's parameters.
        seed: Of the initial weights and of the data.
        steps: Training steps before the save.
        extra_flags: More of Megatron's command line; later flags win.
        without_flags: Flags without a value that are taken away again, such as
            ``--untie-embeddings-and-output-weights``.
    """

    name: str
    model: Model = "dense"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    num_layers: int = 4
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    optimizer_format: OptimizerFormat = "dp_reshardable"
    ckpt_format: CkptFormat = "torch_dist"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    seed: int = 1234
    steps: int = 2
    extra_flags: tuple[str, ...] = ()
    without_flags: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Processes to start."""
        return self.tp * self.pp * self.dp

    def key(self) -> str:
        """Digest all that changes the checkpoint: fields (but the name), flags, trainer, Megatron and torch."""
        fields = dataclasses.asdict(self) | {"name": ""}
        if not self.without_flags:
            del fields["without_flags"]  # most recipes have none, and keep the name that they are cached under
        versions = [version("megatron-core"), version("torch")]
        sources = [(Path(__file__).parent / name).read_text() for name in _TRAINER_SOURCES]
        text = json.dumps([fields, CPU_FLAGS, _COMMON_FLAGS, _MODEL_FLAGS, versions, sources], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def megatron_flags(self) -> list[str]:
        """Megatron-LM's command line for this recipe, without ``--save`` and ``--load``."""
        flags = [*CPU_FLAGS, *_COMMON_FLAGS, *_MODEL_FLAGS[self.model], *self._layout_flags()]
        flags += ["--seed", self.seed, "--train-iters", self.steps, "--save-interval", self.steps]
        if self.dtype != "fp32":
            flags += [f"--{self.dtype}"]
        if self.optimizer_format == "fully_reshardable":
            flags += ["--dist-ckpt-optim-fully-reshardable"]
        return [str(flag) for flag in (*flags, *self.extra_flags) if flag not in self.without_flags]

    def _layout_flags(self) -> list[str | int]:
        flags: list[str | int] = ["--tensor-model-parallel-size", self.tp, "--pipeline-model-parallel-size", self.pp]
        if self.model == "hybrid":  # the pattern says how many layers there are
            pattern = ("M-M*" * self.num_layers)[: self.num_layers]
            return [*flags, "--hybrid-layer-pattern", pattern]
        flags += ["--num-layers", self.num_layers]
        if self.model == "moe":
            flags += ["--expert-model-parallel-size", self.ep]
            flags += [] if self.etp is None else ["--expert-tensor-parallel-size", self.etp]
            flags += ["--sequence-parallel"] if self.tp > 1 else []
        if self.vpp > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", self.vpp]
        if self.first_stage_layers is not None:
            flags += ["--decoder-first-pipeline-num-layers", self.first_stage_layers]
        if self.last_stage_layers is not None:
            flags += ["--decoder-last-pipeline-num-layers", self.last_stage_layers]
        return flags


def launch_command(recipe: Recipe, flags: Sequence[str], trainer: str = TRAINER) -> list[str]:
    """The line that runs a trainer for a recipe under torchrun, with more of its flags at the end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(recipe.world_size)]
    return [sys.executable, *torchrun, "-m", trainer, *recipe.megatron_flags(), *flags]


def launch_environment() -> dict[str, str]:
    """Variables that it needs beside the caller's: the package on the path, one thread per rank."""
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def _launch(recipe: Recipe, flags: list[str], timeout_seconds: float, trainer: str = TRAINER) -> str:
    """Run a trainer under torchrun and return what it printed.

    Raises:
        MegatronRunError: It failed, or ran longer than the timeout.
    """
    command = launch_command(recipe, flags, trainer)
    env = os.environ | launch_environment()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            code: int | None = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(process)
        log.seek(0)
        text = log.read()
    if code == 0:
        return text
    reason = f"did not end within {timeout_seconds:g} s" if code is None else f"ended with code {code}"
    own_words, _, _ = text.partition(
        "torch/distributed/elastic/multiprocessing/api.py"
    )  # then torchrun's report begins
    tail = "\n".join(own_words.splitlines()[-_LOG_LINES_SHOWN:])
    raise MegatronRunError(f"Megatron, for recipe {recipe.name!r}, {reason}. Its last lines:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _saved_iteration(root: Path) -> Path:
    iteration = int((root / "latest_checkpointed_iteration.txt").read_text())
    return root / f"iter_{iteration:07d}"


def _format_on_disk(root: Path) -> CkptFormat:
    folder = _saved_iteration(root)
    if (folder / "metadata.json").exists():
        return "torch_dist"
    return "torch_dcp" if (folder / ".metadata").exists() else "torch"


def make_checkpoint(
    recipe: Recipe, out: Path, *, trainer: str = TRAINER, timeout_seconds: float = TIMEOUT_SECONDS
) -> Path:
    """Train as the recipe says and save to ``out``.

    Args:
        recipe: What to train and how to save it.
        out: The checkpoint root, which gets the tracker file and ``iter_NNNNNNN/``; made if missing.
        trainer: Module to run.
        timeout_seconds: How long all of it may take.

    Returns:
        ``out / iter_NNNNNNN``.

    Raises:
        MegatronRunError: Megatron failed or took too long.
    """
    _launch(recipe, ["--ckpt-format", recipe.ckpt_format, "--save", str(out)], timeout_seconds, trainer)
    return _saved_iteration(out)


def resave(
    src: Path, recipe: Recipe, out: Path, *, trainer: str = TRAINER, timeout_seconds: float = TIMEOUT_SECONDS
) -> Path:
    """Have Megatron load ``src`` under the recipe's layout and save the same state to ``out``, untrained.

    A source in ``fully_reshardable`` form can take any layout; ``dp_reshardable`` only another ``dp``, and the legacy
    ``torch`` format none. The recipe has to describe the same model.

    Args:
        src: A checkpoint root.
        recipe: The layout to load it under, and the form to save it in. Its ``steps`` are ignored.
        out: The root to write.
        trainer: Module to run.
        timeout_seconds: How long all of it may take.

    Returns:
        ``out / iter_NNNNNNN``, of the iteration that ``src`` is at.

    Raises:
        MegatronRunError: Megatron failed or took too long.
    """
    flags = ["--ckpt-format", _format_on_disk(src), "--load", str(src), "--exit-on-missing-checkpoint"]
    _launch(recipe, [*flags, f"--resave={recipe.ckpt_format}", "--save", str(out)], timeout_seconds, trainer)
    return _saved_iteration(out)


def check_loads(src: Path, recipe: Recipe, *, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
    """Have Megatron load ``src`` (model, optimizer, RNG state) under the recipe's layout; return what it printed.

    Args:
        src: A checkpoint root, whoever wrote it.
        recipe: The model and the layout to load it under.
        timeout_seconds: How long all of it may take.

    Raises:
        MegatronRunError: Megatron did not accept it; the message has its last lines.
    """
    flags = ["--ckpt-format", _format_on_disk(src), "--load", str(src), "--exit-on-missing-checkpoint", "--load-only"]
    return _launch(recipe, flags, timeout_seconds)


def resume(
    src: Path,
    recipe: Recipe,
    out: Path,
    *,
    trainer: str = TRAINER,
    switches: tuple[str, ...] = (),
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Path:
    """Have Megatron load ``src`` under the recipe's layout, train on to the recipe's ``steps``, and save to ``out``.

    Args:
        src: A checkpoint root, whoever wrote it.
        recipe: The model, the layout, the step to stop at and the form to save in.
        out: The root to write.
        trainer: Module to run instead of the tiny trainer.
        switches: For that module.
        timeout_seconds: How long all of it may take.

    Returns:
        ``out / iter_NNNNNNN``.

    Raises:
        MegatronRunError: Megatron failed or took too long.
    """
    flags = ["--ckpt-format", _format_on_disk(src), "--load", str(src), "--exit-on-missing-checkpoint"]
    flags += ["--use-checkpoint-opt_param-scheduler"]  # the run's length is in the scheduler, and it is another one now
    _launch(recipe, [*flags, "--save", str(out), *switches], timeout_seconds, trainer)
    return _saved_iteration(out)


def _both_formats(recipe: Recipe) -> tuple[Recipe, Recipe]:
    return (
        dataclasses.replace(recipe, optimizer_format="dp_reshardable"),
        dataclasses.replace(recipe, name=f"{recipe.name}_full", optimizer_format="fully_reshardable"),
    )


DENSE_TP1_PP1, DENSE_TP1_PP1_FULL = _both_formats(Recipe(name="dense_tp1_pp1"))
DENSE_TP2_PP2, DENSE_TP2_PP2_FULL = _both_formats(Recipe(name="dense_tp2_pp2", tp=2, pp=2))
DENSE_PP4_UNEVEN, DENSE_PP4_UNEVEN_FULL = _both_formats(
    Recipe(name="dense_pp4_uneven", pp=4, num_layers=6, first_stage_layers=1, last_stage_layers=1)
)
DENSE_TP2_DP2, DENSE_TP2_DP2_FULL = _both_formats(Recipe(name="dense_tp2_dp2", tp=2, dp=2))
DENSE_PP2_VPP2, DENSE_PP2_VPP2_FULL = _both_formats(Recipe(name="dense_pp2_vpp2", pp=2, vpp=2))
MOE_EP2_PP2, MOE_EP2_PP2_FULL = _both_formats(Recipe(name="moe_ep2_pp2", model="moe", pp=2, dp=2, ep=2))
MOE_TP1_PP1, MOE_TP1_PP1_FULL = _both_formats(Recipe(name="moe_tp1_pp1", model="moe"))
MOE_EP2, MOE_EP2_FULL = _both_formats(Recipe(name="moe_ep2", model="moe", dp=2, ep=2))
MOE_TP2_EP2, MOE_TP2_EP2_FULL = _both_formats(Recipe(name="moe_tp2_ep2", model="moe", tp=2, ep=2, etp=1))
HYBRID_TP1, HYBRID_TP1_FULL = _both_formats(Recipe(name="hybrid_tp1", model="hybrid"))
HYBRID_TP2, HYBRID_TP2_FULL = _both_formats(Recipe(name="hybrid_tp2", model="hybrid", tp=2))
LEGACY_TP1_PP1 = dataclasses.replace(DENSE_TP1_PP1, name="legacy_tp1_pp1", ckpt_format="torch")
LEGACY_TP2_PP2 = dataclasses.replace(DENSE_TP2_PP2, name="legacy_tp2_pp2", ckpt_format="torch")
# Megatron trains into torch_dcp with torch's FSDP2 only, which has no CPU form here; it is a target for resave().
DENSE_DCP = dataclasses.replace(DENSE_TP1_PP1, name="dense_dcp", ckpt_format="torch_dcp")
LEGACY_MOE_EP2 = Recipe(name="legacy_moe_ep2", model="moe", dp=2, ep=2, ckpt_format="torch")

RECIPES: dict[str, Recipe] = {value.name: value for value in list(globals().values()) if isinstance(value, Recipe)}
"""Every named recipe above, by its name."""
