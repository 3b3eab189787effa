"""Faults for resumed runs: what each does, where it is planted, and what has to be reported first.

``plant`` is for an ``Order``: ``plugin="ckptguard.testing.resume_faults:plant"``, ``plugin_argument`` the names of what to
plant, with ``+`` between them. It is called in every rank of an arm, when its recorder starts. Faults of a checkpoint's files
are ``file_edits``, those of the launch are flags and variables in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ckptguard.core.watching import Group
from ckptguard.testing.recipes import Recipe

Sort = Literal["state", "compute", "control"]
Where = Literal["process", "files", "launch", "nowhere", "GPU"]
Answer = Literal["loaded", "step", "silent", "explained", "refused", "not run"]
PREPARED = "prepared"
"""What the recipe ``dense`` is planted with in every arm: values that faults need and that change nothing else."""

_EXPERTS = r"\.experts\.local_experts\.[01]\."


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The first report that a fault has to have.

    Attributes:
        answer: ``loaded`` or ``step``: a difference in that kind of event; ``explained``: a rule explains all there is.
        group: Group of the first item; None where several can be the first.
        item: Pattern of its name.
        rank: Of it; None where it is the same on all.
        module: Pattern of the module to blame, for compute faults.
        operation: Pattern of the operation to blame.
    """

    answer: Answer
    group: Group | None = None
    item: str = ""
    rank: int | None = 0
    module: str = ""
    operation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, or a harmless change.

    Attributes:
        name: For command lines.
        what: What it does, in words.
        sort: ``state``: something else is loaded than was saved; ``compute``: equal state gives other values.
        recipe: Key of ``FAULT_RECIPES``.
        where: ``process``: ``plant`` does it; ``files``: an edit of the checkpoint; ``launch``: flags or variables of the
            resumed arm; ``nowhere``: the recipe itself has it; ``GPU``: it cannot be had on a CPU.
        expected: The first report.
        prepared: Every arm has to be planted with ``PREPARED``, or there is nothing to act on.
        flags: Added to the resumed arm's line.
        variables: Added to the resumed arm's environment.
    """

    name: str
    what: str
    sort: Sort
    expected: Expected
    recipe: str = "dense"
    where: Where = "process"
    prepared: bool = False
    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def arms(self) -> tuple[str, ...]:
        """Roles of the arms in which it is planted."""
        return ("resume",) if self.sort == "compute" else ("load", "resume")


def _recipe(name: str, flags: str = "", *, num_layers: int = 2, **fields: Any) -> Recipe:
    return Recipe(name=name, num_layers=num_layers, steps=4, extra_flags=tuple(flags.split()), **fields)


_EXPERT_FLAGS = (
    "--moe-router-topk 3 --moe-router-score-function sigmoid --moe-router-load-balancing-type none"
    " --moe-router-enable-expert-bias --moe-router-dtype fp32"
)
FAULT_RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _recipe(
            "dense",  # 80 is no multiple of the 64 elements at which parameters begin: buckets have padding
            "--hidden-size 80 --decoupled-lr 5e-4 --decoupled-min-lr 5e-5 --lr-decay-style cosine"
            " --start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear",
        ),
        _recipe("dropout", "--hidden-dropout 0.1 --attention-dropout 0.1"),
        _recipe("fp16", "--initial-loss-scale 65536 --loss-scale-window 3 --hysteresis 2", dtype="fp16"),
        _recipe("moe", _EXPERT_FLAGS, model="moe"),
        # bf16 would round the smallest differences away. Megatron 0.19.2 does not load the other form of an fp32 optimizer:
        # load_parameter_state_from_dp_reshardable copies into views of parameters outside of no_grad.
        _recipe("moe-fp32", _EXPERT_FLAGS, model="moe", dtype="fp32", optimizer_format="fully_reshardable"),
        _recipe("moe-biased", f"{_EXPERT_FLAGS} --moe-router-force-biased -0.5", model="moe"),
        _recipe("moe-ep2", _EXPERT_FLAGS, model="moe", dp=2, ep=2),
        _recipe("tp2", "--hidden-dropout 0.1 --attention-dropout 0.1", tp=2),
        _recipe("vpp2", pp=2, vpp=2, num_layers=4),
        _recipe("dp3", "--global-batch-size 6", dp=3),
        _recipe("overlap", "--overlap-grad-reduce --overlap-param-gather", dp=2),
    )
}
"""Small runs of four steps in which every fault can act, by name."""


def _loaded(group: Group, item: str, rank: int | None = 0) -> Expected:
    return Expected(answer="loaded", group=group, item=item, rank=rank)


def _step(group: Group | None, item: str, rank: int | None = 0, module: str = "", operation: str = "") -> Expected:
    return Expected(answer="step", group=group, item=item, rank=rank, module=module, operation=operation)


_SILENT, _NOT_RUN = Expected(answer="silent"), Expected(answer="not run")
_state, _compute = partial(Fault, sort="state"), partial(Fault, sort="compute")
_control = partial(Fault, sort="control", expected=_SILENT)
_fp16, _moe = partial(_state, recipe="fp16"), partial(_state, recipe="moe")

_VALUES = (
    _state(
        name="exp_avg-bit",
        what="the lowest bit of one element of exp_avg flipped",
        expected=_loaded("optimizer", "^optimizer exp_avg chunk"),
    ),
    _state(
        name="exp_avg_sq-bit",
        what="the lowest bit of one element of exp_avg_sq flipped",
        expected=_loaded("optimizer", "^optimizer exp_avg_sq chunk"),
    ),
    _state(
        name="master-bit",
        what="the lowest bit of one fp32 master flipped, the bf16 weight as it was",
        expected=_loaded("master", "^master chunk"),
    ),
    _state(
        name="sign-of-zero",
        what="+0 made -0 in a weight",
        prepared=True,
        expected=_loaded("parameter", "word_embeddings"),
    ),
    _state(
        name="nan-payload",
        what="a NaN in a master given another payload, in a row that no sample reads",
        prepared=True,
        expected=_loaded("master", "word_embeddings"),
    ),
    _state(
        name="paired-bits",
        what="the same bit of two elements of exp_avg flipped: they cancel under XOR",
        expected=_loaded("optimizer", "^optimizer exp_avg chunk"),
    ),
    _state(
        name="swapped-elements",
        what="two elements of a weight swapped",
        expected=_loaded("parameter", "^parameter chunk"),
    ),
    _moe(
        name="swapped-experts",
        what="weights, masters and states of two experts swapped",
        expected=_loaded("master", _EXPERTS),
    ),
    _moe(
        name="expert-bias-bf16",
        what="expert_bias kept in bf16 after loading, the numbers as they were",
        expected=_loaded("buffer", r"expert_bias"),
    ),
    _state(
        name="missing-key",
        what="a weight missing in what was read; Megatron's second, lax load hides it",
        expected=_loaded("parameter", "output_layer"),
    ),
    _state(
        name="vpp-chunks-swapped",
        what="layers of two virtual pipeline chunks swapped",
        recipe="vpp2",
        expected=_loaded("master", "^master chunk 0"),
    ),
    _state(
        name="stale-checkpoint",
        what="all tensors in the files are those of the step before",
        where="files",
        expected=_loaded("master", "^master"),
    ),
    _state(
        name="stale-shard",
        what="the tensors in one DP rank's files are those of the step before",
        where="files",
        recipe="dp3",
        expected=_loaded("master", "^master", 1),
    ),
    _state(
        name="amax-history-zeroed",
        what="amax history in an _extra_state zeroed (stand-in in TE's form)",
        prepared=True,
        expected=_loaded("extra state", "linear_fc2"),
    ),
    _state(
        name="fp8-scale-changed",
        what="scale in an _extra_state doubled (stand-in in TE's form)",
        prepared=True,
        expected=_loaded("extra state", "linear_fc2"),
    ),
    _state(
        name="mxfp8-scale-byte",
        what="a block scale of an MXFP8 weight changed: needs Transformer Engine's kernels",
        where="GPU",
        expected=_NOT_RUN,
    ),
)

_COUNTS = (
    _state(
        name="emptied-group",
        what="a parameter group lost its parameters",
        expected=_loaded("param group", r"params$"),
    ),
    _state(
        name="swapped-groups",
        what="two parameter groups got each other's options",
        expected=_loaded("param group", "^param group 0.0"),
    ),
    _state(
        name="copied-max-lr",
        what="a parameter group got another one's max_lr",
        expected=_loaded("param group", "max_lr"),
    ),
    _state(
        name="copied-wd-mult",
        what="a parameter group got another one's wd_mult",
        expected=_loaded("param group", "wd_mult"),
    ),
    _state(name="adam-step-plus", what="Adam's step + 1", expected=_loaded("param group", "step$")),
    _state(name="adam-step-minus", what="Adam's step - 1", expected=_loaded("param group", "step$")),
    _state(
        name="stale-weight-decay",
        what="groups have the weight decay of the schedule's beginning",
        expected=_loaded("param group", "weight_decay"),
    ),
    _state(
        name="scheduler-plus",
        what="the scheduler's num_steps + 1",
        expected=_loaded("scheduler", "num_steps"),
    ),
    _fp16(name="growth-tracker-plus", what="growth tracker + 1", expected=_loaded("scaler", "growth_tracker")),
    _fp16(name="growth-tracker-minus", what="growth tracker - 1", expected=_loaded("scaler", "growth_tracker")),
    _fp16(name="hysteresis-minus", what="hysteresis tracker - 1", expected=_loaded("scaler", "hysteresis")),
    _state(
        name="tp-rng-swapped",
        what="TP ranks have each other's model-parallel generator",
        recipe="tp2",
        expected=_loaded("rng", "model-parallel"),
    ),
    _state(
        name="ep-rng-of-rank-0",
        what="EP ranks come back with EP rank 0's generators: Megatron 0.19.2 does so by itself",
        where="nowhere",
        recipe="moe-ep2",
        expected=_loaded("rng", "expert-parallel", 1),
    ),
    _state(
        name="torch-rng-omitted",
        what="torch's CPU generator not restored",
        recipe="dropout",
        expected=_loaded("rng", "torch cpu"),
    ),
    _state(
        prepared=True, name="numpy-rng-omitted", what="numpy's generator not restored", expected=_loaded("rng", "numpy")
    ),
    _state(
        prepared=True,
        name="python-rng-omitted",
        what="Python's generator not restored",
        expected=_loaded("rng", "python"),
    ),
    _state(
        name="samples-plus",
        what="consumed samples + 1 micro-batch",
        expected=_loaded("counter", "consumed_train_samples"),
    ),
    _state(
        name="samples-minus",
        what="consumed samples - 1 micro-batch",
        expected=_loaded("counter", "consumed_train_samples"),
    ),
    _state(name="skipped-batch", what="the sampler leaves out a batch", expected=_step("batch", "^batch 0")),
    _state(name="repeated-batch", what="the sampler gives a batch twice", expected=_step("batch", "^batch 1")),
    _state(
        name="router-bias-cache",
        what="RandomSTEShared's cache, which no checkpoint holds: the resumed run draws another bias",
        where="nowhere",
        recipe="moe-biased",
        expected=_loaded("other", "router bias"),
    ),
)

_COMPUTE = (
    _compute(
        name="wrong-bit",
        what="one bit of a matrix product in one micro-batch is wrong, below every hook",
        expected=_step("gradient", "^gradient", module="layers.1.mlp.linear_fc1", operation="aten.mm"),
    ),
    _compute(
        name="scatter-order",
        what="a scatter_add sums in another order",
        recipe="moe-fp32",
        expected=_step(None, "^(loss|gradient) ", module="layers.0.mlp", operation="scatter_add"),
    ),
    _compute(
        name="reduction-order",
        what="reduce-scatter of gradients sums the ranks' contributions in another order",
        recipe="dp3",
        expected=_step("gradient", "^gradient", None, operation="reduce_scatter"),
    ),
    _compute(
        name="dropped-gradient",
        what="a rank contributes zeros for one bucket of gradients",
        recipe="dp3",
        expected=_step("gradient", "^gradient", operation="reduce_scatter"),
    ),
    _compute(
        name="skipped-parameter-sync",
        what="the ranks do not gather each other's updated parameters",
        recipe="dp3",
        expected=_step("parameter", "^parameter", None, operation="all_?gather"),
    ),
    _compute(
        name="hooks-stay-off",
        what="forward pre-hooks, off in a process's first step, are never put on",
        recipe="overlap",
        expected=_step("other", "forward pre-hooks", None),
    ),
    _compute(
        name="empty-read",
        what="a norm adds memory that it never wrote",
        prepared=True,
        expected=_step("loss", "lm loss", module="final_layernorm", operation="aten.add"),
    ),
    _compute(
        name="less-precise-products",
        what="torch.set_float32_matmul_precision: other kernels for fp32 products, and bf16 where the CPU has it",
        recipe="moe-fp32",
        expected=_step(None, "^(loss|gradient) ", module="router", operation="aten.mm"),
    ),
    _compute(
        name="other-nccl-algo",
        what="NCCL_ALGO is another one in the resumed arm",
        where="launch",
        variables=(("NCCL_ALGO", "Tree"),),
        expected=Expected(answer="refused"),
    ),
    _compute(
        name="attention-backward",
        what="attention's backward made non-deterministic: needs a GPU's kernels",
        where="GPU",
        expected=_NOT_RUN,
    ),
)

_CONTROLS = (
    _control(name="nothing", what="nothing is planted", where="nowhere"),
    _control(name="padding", what="random bytes where buckets belong to no parameter", where="files"),
    _control(
        name="saved-again",
        what="the checkpoint loaded and saved again, in other processes",
        where="files",
        recipe="dropout",
    ),
    _control(name="other-files", what="data files with other names in another order", where="files"),
    _control(name="log-interval", what="--log-interval 2", where="launch", flags=("--log-interval", "2")),
    _control(name="num-workers", what="--num-workers 1", where="launch", flags=("--num-workers", "1")),
    _control(
        name="torch-rng-draw",
        what="one draw of torch's CPU generator before the first step, which nothing uses",
        prepared=True,
        expected=Expected(answer="explained", group="rng", item="torch cpu", rank=None),
    ),
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*_VALUES, *_COUNTS, *_COMPUTE, *_CONTROLS)}
"""Every row of the matrix, by name."""


def plant(recorder: Any, names: str) -> None:
    """Plants faults in this process.

    Args:
        recorder: A ``resume.recorder.Recorder`` that has just started.
        names: Of faults that are planted in processes, or ``PREPARED``, with ``+`` between them.

    Raises:
        KeyError: One is not known, or not to be planted in a process.
    """
    from ckptguard.testing.resume_plants import PLANTS

    for name in names.split("+"):
        PLANTS[name](recorder)


def file_edits() -> dict[str, Callable[[Any], None]]:
    """By name of a fault: what it does to the root of a checkpoint."""
    from ckptguard.testing import resume_file_plants as files

    return {
        "stale-checkpoint": files.stale(),
        "stale-shard": files.stale(r"^__1_"),
        "padding": files.random_padding,
        "other-files": files.other_files,
    }
