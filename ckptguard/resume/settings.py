"""Settings without which two runs of one line need not be equal, checked before anything starts. Pure.

What Megatron-LM's ``--deterministic-mode`` checks and sets stands in megatron/training/determinism.py (megatron-core 0.19.2);
Bridge's (bridge/training/config.py, 0.6.2) asks for less, so the stricter set is asked of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckptguard.core.errors import UsageError
from ckptguard.megatron.launch_line import Framework
from ckptguard.megatron.run_flags import flag_value, override_value
from ckptguard.resume.results import Setting

_NCCL_TOKENS = frozenset({"Ring", "CollnetDirect", "CollnetChain", "^NVLS"})
_CUBLAS = (":4096:8", ":16:8")
_BLACKWELL = 10  # compute capability

# Variables that choose kernels, algorithms or the order of sums: other values give other bits.
_NUMERIC_VARIABLES = re.compile(
    r"NCCL_(ALGO|PROTO|MIN_NCHANNELS|MAX_NCHANNELS|NVLS_ENABLE|COLLNET_ENABLE)|NVTE_\w+|CUBLAS\w*|CUDNN_\w+"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUDA_DEVICE_MAX_CONNECTIONS|\w+_DETERMINISTIC|TRITON_\w+"
    r"|TORCHINDUCTOR_\w+|TORCHDYNAMO_DISABLE|OMP_NUM_THREADS|MKL_\w+|PYTHONHASHSEED"
)
# Settings that say what is trained and on what; a resumed run may only be laid out differently.
_LM_SAME = (
    "--seed", "--data-path", "--train-data-path", "--split", "--global-batch-size", "--rampup-batch-size", "--seq-length",
    "--train-iters", "--train-samples", "--lr", "--min-lr", "--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples",
    "--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction", "--weight-decay", "--start-weight-decay",
    "--end-weight-decay", "--clip-grad", "--adam-beta1", "--adam-beta2", "--adam-eps", "--optimizer", "--num-layers",
    "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--num-experts", "--moe-router-topk", "--hidden-dropout",
    "--attention-dropout", "--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--deterministic-mode", "--attention-backend",
    "--transformer-impl", "--cross-entropy-loss-fusion", "--finetune", "--reset-position-ids", "--reset-attention-mask",
)  # fmt: skip
_BRIDGE_SAME = (
    "rng.seed", "dataset.blend", "dataset.random_seed", "train.global_batch_size", "train.rampup_batch_size",
    "train.train_iters", "train.train_samples", "model.seq_length", "dataset.seq_length", "optimizer.lr", "optimizer.min_lr",
    "optimizer.weight_decay", "optimizer.clip_grad", "optimizer.adam_beta1", "optimizer.adam_beta2", "optimizer.adam_eps",
    "optimizer.optimizer", "scheduler.lr_decay_style", "scheduler.lr_decay_iters", "scheduler.lr_warmup_iters",
    "model.num_layers", "model.hidden_size", "model.hidden_dropout", "model.attention_dropout", "model.deterministic_mode",
    "model.attention_backend", "model.cross_entropy_loss_fusion", "mixed_precision",
)  # fmt: skip


def check(
    framework: Framework,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    gpu: bool,
    versions: Mapping[str, str],
    hidden: bool = False,
) -> tuple[Setting, ...]:
    """Settings that are not as they should be.

    Args:
        framework: Who trains.
        arguments: The script's own.
        environment: The user's variables, with those that the line sets.
        gpu: Whether the run uses GPUs; if not, what concerns only them is not asked for.
        versions: What is known of ``causal-conv1d``, ``cudnn`` (such as ``9.18.1``) and ``compute-capability`` (``10.0``).
        hidden: The arguments cannot all be seen, so that a flag which is not there may still be set: it is advised only.
    """
    found = [*_variables(environment, asked=gpu, sets_them=_sets_variables(framework, arguments))]
    if gpu:
        found += _flags(framework, arguments, hidden=hidden or framework == "bridge")
        found += _kernels(arguments, environment, versions)
    if not environment.get("PYTHONHASHSEED", "").isdigit():
        why = "Python orders sets of strings by a random hash, anew in every process"
        found.append(Setting("PYTHONHASHSEED", environment.get("PYTHONHASHSEED"), "0", why, "advised", "variable"))
    return tuple(found)


def fixed_environment(settings: Sequence[Setting]) -> dict[str, str]:
    """The variables that ``--fix-env`` sets."""
    return {setting.name: setting.wanted for setting in settings if setting.fix == "variable"}


def contradictions(
    framework: Framework,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    resume_args: Sequence[str],
    resume_environment: Mapping[str, str],
) -> None:
    """Refuses a resumed run that is told to compute something else than the reference.

    Args:
        framework: Who trains.
        arguments: The script's own.
        environment: Of the reference.
        resume_args: What the resumed run gets besides.
        resume_environment: Variables that the resumed run gets besides.

    Raises:
        UsageError: Names every variable and flag, with both values.
    """
    found = [
        f"{name} is {_told(environment.get(name))} in the reference and {value} in the resumed run"
        for name, value in resume_environment.items()
        if _NUMERIC_VARIABLES.fullmatch(name) and environment.get(name) != value
    ]
    names = {"megatron-lm": _LM_SAME, "bridge": _BRIDGE_SAME, "torch": ()}[framework]
    value_of = override_value if framework == "bridge" else flag_value
    for name in names:
        one, other = value_of(arguments, name), value_of(resume_args, name)
        if other is not None and other != one:
            found.append(f"{name} is {_told(one)} in the reference and {_told(other)} in the resumed run")
    if found:
        raise UsageError(
            "the resumed run would differ by its settings alone: " + "; ".join(found),
            next_step="A resumed run may be laid out differently (parallel sizes, micro-batch size), nothing else.",
        )


def _told(value: str | None) -> str:
    return "unset" if value is None else value or "set"


def _sets_variables(framework: Framework, arguments: Sequence[str]) -> bool:
    """Whether the framework sets what is unset itself: Megatron-LM does in ``apply_determinism_env``; Bridge does not."""
    return framework == "megatron-lm" and flag_value(arguments, "--deterministic-mode") is not None


def _variables(environment: Mapping[str, str], *, asked: bool, sets_them: bool) -> Iterator[Setting]:
    if not asked:
        return
    algorithms = environment.get("NCCL_ALGO")
    tokens = [token.strip() for token in (algorithms or "").split(",") if token.strip()]
    if not (sets_them and algorithms is None) and (not tokens or not _NCCL_TOKENS.issuperset(tokens)):
        why = "NCCL otherwise chooses by size and topology, and Tree sums in an order that nobody fixes"
        yield Setting("NCCL_ALGO", algorithms, "Ring", why, "required", "variable")
    transformer_engine = environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    if transformer_engine != "0" and not (sets_them and transformer_engine is None):
        why = "Transformer Engine otherwise may take attention kernels whose backward pass adds in any order"
        yield Setting("NVTE_ALLOW_NONDETERMINISTIC_ALGO", transformer_engine, "0", why, "required", "variable")
    workspace = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if workspace not in _CUBLAS and not (sets_them and workspace is None):
        why = "cuBLAS is deterministic only with a fixed workspace per stream"
        yield Setting("CUBLAS_WORKSPACE_CONFIG", workspace, _CUBLAS[0], why, "required", "variable")
    for name in ("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC"):
        value = environment.get(name, "")
        if value and not value.startswith("1"):
            yield Setting(
                name, value, "1", "it turns the deterministic kernels of SSM layers off", "required", "variable"
            )


def _flags(framework: Framework, arguments: Sequence[str], *, hidden: bool) -> Iterator[Setting]:
    if framework == "torch":
        return
    bridge = framework == "bridge"
    mode, value = (
        ("model.deterministic_mode", override_value(arguments, "model.deterministic_mode"))
        if bridge
        else ("--deterministic-mode", flag_value(arguments, "--deterministic-mode"))
    )
    if value is None or value.lower() in ("false", "null"):
        why = "without it torch, Transformer Engine and fused kernels may add in any order"
        severity = "advised" if hidden and value is None else "required"
        yield Setting(mode, value, "true" if bridge else "set", why, severity, "flag")  # type: ignore[arg-type]
    fusion, overlap = (
        ("model.cross_entropy_loss_fusion", "comm_overlap.tp_comm_overlap")
        if bridge
        else ("--cross-entropy-loss-fusion", "--tp-comm-overlap")
    )
    for name, why in ((fusion, "it is not deterministic"), (overlap, "its sums have no fixed order")):
        found = override_value(arguments, name) if bridge else flag_value(arguments, name)
        if found is not None and found.lower() not in ("false", "null"):
            yield Setting(name, found or "set", "false" if bridge else "not set", why, "required", "flag")
    if not bridge and not hidden and flag_value(arguments, "--no-gradient-accumulation-fusion") is None:
        why = "the fused kernel adds weight gradients in place; Megatron's own determinism tests run without it"
        yield Setting("--no-gradient-accumulation-fusion", None, "set", why, "advised", "flag")


def _kernels(
    arguments: Sequence[str], environment: Mapping[str, str], versions: Mapping[str, str]
) -> Iterator[Setting]:
    if environment.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1" and not any("fsdp" in word for word in arguments):
        why = "kernels and collectives then start in the order in which they are issued"
        found = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
        yield Setting("CUDA_DEVICE_MAX_CONNECTIONS", found, "1", why, "advised", "variable")
    has_ssm = any(re.search("mamba|hybrid|nemotron_?h|falcon_?h", word.lower()) for word in arguments)
    if has_ssm and environment.get("TRITON_CACHE_AUTOTUNING") != "1":
        why = "Triton times the kernels of SSM layers anew in every process, and may choose another one"
        found = environment.get("TRITON_CACHE_AUTOTUNING")
        yield Setting("TRITON_CACHE_AUTOTUNING", found, "1", why, "advised", "variable")
    convolution = versions.get("causal-conv1d")
    if has_ssm and convolution is not None and _older(convolution, (1, 6, 0)):
        why = "older ones add in any order in the backward pass"
        yield Setting("causal-conv1d", convolution, "1.6.0 or newer", why, "required", "flag")
    cudnn, capability = versions.get("cudnn"), versions.get("compute-capability", "0")
    if cudnn is not None and int(capability.partition(".")[0]) >= _BLACKWELL and _older(cudnn, (9, 18, 1)):
        why = "older ones have no deterministic 16-bit attention on Blackwell"
        yield Setting("cuDNN", cudnn, "9.18.1 or newer", why, "required", "flag")


def _older(version: str, than: tuple[int, ...]) -> bool:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < than
