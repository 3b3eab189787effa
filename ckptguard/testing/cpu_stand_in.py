"""Let Megatron Core and Megatron-LM run on a machine without a GPU.

The ``torch.cuda`` calls that Megatron makes are redirected to the CPU, Megatron is given an Adam with the state layout
of apex's, and a few lines of its start-up that only make sense beside a CUDA device are skipped. What Megatron then
computes, saves and loads is its own code, unmodified. Where a GPU is present, :func:`install` does nothing.

There are two ways in:

* a program of one's own calls :func:`install` before it imports megatron (``ckptguard/testing/tiny_trainer.py`` does);
* an unmodified script (``torchrun pretrain_gpt.py ...``) runs with :func:`site_directory` first on ``PYTHONPATH``;
  Python then imports the ``sitecustomize`` in there, which installs the stand-in as soon as the script has imported
  torch.

The command line has to choose what needs no kernels: ``--transformer-impl local --attention-backend unfused
--distributed-backend gloo --use-cpu-initialization`` and the ``--no-*-fusion`` flags; ``recipes.CPU_FLAGS`` lists them.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
import torch.utils.data
from torch.overrides import TorchFunctionMode

from ckptguard.core.after_import import after_import

_installed = False


class _Stream:
    """Stands for a stream or an event: enters, leaves, waits and records without doing anything."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def record(self, *args: Any) -> None:
        self.recorded_at = time.perf_counter()

    def elapsed_time(self, other: _Stream) -> float:
        """Milliseconds between two records, as ``torch.cuda.Event`` gives them."""
        return (other.recorded_at - self.recorded_at) * 1e3

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def wait(self, *args: Any) -> None:
        return None

    def record_event(self, *args: Any) -> Self:
        return self

    synchronize = wait_stream = wait_event = wait


class _Properties:
    """Device properties of something recent, so that Megatron takes none of its branches for old GPUs."""

    major, minor, multi_processor_count, name, total_memory = 9, 0, 132, "cpu", 80 << 30


class _CudaMeansCpu(TorchFunctionMode):
    """Calls that name a CUDA device make CPU tensors, and ``Tensor.type()`` keeps the CUDA spelling."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        name = getattr(func, "__name__", "")
        if name == "to":
            args = tuple("cpu" if isinstance(a, (str, torch.device)) and str(a).startswith("cuda") else a for a in args)
        if name == "type" and len(args) == 1:  # DistributedOptimizer groups its parameters by this string
            return "torch.cuda." + func(*args).split(".")[-1]
        return func(*args, **kwargs)


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay, with the constructor and the state layout of apex's FusedAdam.

    torch's own Adam keeps ``step`` per parameter and has no state before the first step, and
    ``DistributedOptimizer.state_dict`` refuses both when a run is resumed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` is ignored, as Megatron never passes one."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), step = group["betas"], group["step"]
            correction1, correction2 = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
                param.addcdiv_(state["exp_avg"] / correction1, denominator, value=-group["lr"])


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _rng(module: Any) -> None:
    module._get_cuda_rng_state = _get_rng_state
    module._set_cuda_rng_state = _set_rng_state


def _as_numpy(module: Any) -> None:
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor  # the original converts CUDA's only

    module.maybe_move_tensor_to_cpu = move


def _fused_adam(module: Any) -> None:
    module.Adam = FusedAdam
    module.USING_PYTORCH_OPTIMIZER = False


def _fused_adam_state(module: Any) -> None:
    module.Adam = FusedAdam
    module.HAVE_APEX_OR_TE = module.USING_APEX_OPTIMIZER = True


def _no_compile(module: Any) -> None:
    module.compile_helpers = lambda *a, **k: None  # the wheel ships the helper compiled, and has no Makefile


def _norms_with_sequence_parallel(module: Any) -> None:
    """Let Megatron's torch norms be used with sequence parallelism, which a MoE model with TP needs.

    All that it takes is the mark by which Megatron finds the weights whose gradients it has to sum over the TP group.
    """
    original = module.WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for param in norm.parameters():
            param.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = new


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.optimizer": _fused_adam,
    "megatron.core.optimizer.distrib_optimizer": _fused_adam_state,
    "megatron.core.tensor_parallel.random": _rng,
    "megatron.core.datasets.utils": _no_compile,
    "megatron.core.transformer.moe.token_dispatcher": _as_numpy,
    "megatron.core.transformer.torch_norm": _norms_with_sequence_parallel,
}


def _iterators_leave_rng_alone() -> None:
    """Keep DataLoader's draw of a base seed away from the generator that stands for CUDA's.

    On a GPU the draw comes from the CPU generator and dropout from the CUDA one. Here they are one generator, so the
    draw would change dropout after a resume, which it does not do on a GPU.
    """
    original = torch.utils.data.DataLoader.__iter__

    def iterate(self: Any) -> Any:
        state = torch.get_rng_state()
        iterator = original(self)
        torch.set_rng_state(state)
        return iterator

    torch.utils.data.DataLoader.__iter__ = iterate  # type: ignore[method-assign]


def _redirect_cuda(cuda: Any) -> None:
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 8, "current_device": torch.device("cpu"), "set_device": None,
        "get_device_capability": (9, 0), "get_device_properties": _Properties, "get_device_name": "cpu",
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "memory_stats": {}, "empty_cache": None, "reset_peak_memory_stats": None, "synchronize": None,
        "is_current_stream_capturing": False, "manual_seed_all": None, "_lazy_call": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, lambda *a, _answer=answer, **k: _answer)
    cuda.graphs.is_current_stream_capturing = lambda: False
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = cuda.current_stream = lambda *a, **k: _Stream()
    cuda.random._lazy_call = lambda *a, **k: None
    for module in (cuda, cuda.random):
        module.get_rng_state = _get_rng_state
        module.set_rng_state = _set_rng_state
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.default_generators = [torch.default_generator] * 8
    for kind in ("Float", "Half", "BFloat16", "Int", "Long", "Byte", "Double"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))


def install() -> None:
    """Redirect CUDA to the CPU in this process for good. Idempotent; does nothing beside a real GPU.

    Call it before megatron is imported, in the main thread: the part that sees factory calls is a
    ``TorchFunctionMode``, which torch keeps per thread.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # dynamo traces into the redirected calls and fails
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists on it for tensor parallelism
    _iterators_leave_rng_alone()
    _redirect_cuda(torch.cuda)
    accelerator: Any = torch.accelerator
    accelerator.current_stream = lambda *a, **k: _Stream()
    accelerator.current_device_index = lambda *a, **k: 0
    tensor: Any = torch.Tensor
    tensor.cuda = tensor.pin_memory = lambda self, *a, **k: self
    for name, patch in _PATCHES.items():
        after_import(name, patch)
    _CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]


def site_directory() -> Path:
    """Return the folder to put first on ``PYTHONPATH`` so that an unmodified script runs on the CPU."""
    return Path(__file__).parent / "cpu_site"
