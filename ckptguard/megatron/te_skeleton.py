"""A Transformer Engine without kernels: the classes that Megatron Core builds on, with parameters and nothing else.

Served only inside the asking process, and only where the real package is not installed, so that Megatron's own
Transformer Engine specs build on the meta device and say what a GPU run writes. Names and shapes are those of
transformer_engine.pytorch 2.x modules as megatron/core/extensions/transformer_engine.py (0.19.2) calls them: ``Linear``
and ``LayerNormLinear`` have ``weight``, ``bias``, ``layer_norm_weight``, ``layer_norm_bias``; ``GroupedLinear`` has
``weight0``, ``bias0`` and so on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

VERSION = "2.11.0"
"""What the skeleton calls itself: recent enough for all that Megatron 0.19 asks about."""

ROOTS = frozenset(
    {"transformer_engine", "mamba_ssm", "causal_conv1d", "fla", "modelopt", "flash_attn", "fast_hadamard_transform"}
)


class _Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}
        self.primary_weights_in_fp8 = self.fp8 = self.fp8_calibration = self.fp8_initialized = False

    def set_tensor_parallel_group(self, group: Any) -> None:
        self.tp_group = group

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        return None

    def _new(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        data = torch.empty(*shape, dtype=dtype or torch.get_default_dtype())
        self.register_parameter(name, torch.nn.Parameter(data))


def _local(in_features: int, out_features: int, mode: str | None, tp_size: int, tp_group: Any) -> tuple[int, int]:
    """(in, out) features of a tensor parallel rank: column cuts the outputs, row the inputs."""
    size = torch.distributed.get_world_size(tp_group) if tp_group is not None else tp_size
    return (in_features // size if mode == "row" else in_features), (
        out_features // size if mode == "column" else out_features
    )


class Linear(_Module):
    """``weight`` of shape (out, in) and ``bias``."""

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None,
        init_method: Any = None, bias: bool = True, return_bias: bool = False, params_dtype: Any = None,
        parallel_mode: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        i, o = _local(in_features, out_features, parallel_mode, tp_size, tp_group)
        self.in_features, self.out_features, self.use_bias, self.parallel_mode = i, o, bias, parallel_mode
        self._new("weight", o, i, dtype=params_dtype)
        if bias:
            self._new("bias", o, dtype=params_dtype)
        else:
            self.bias = torch.Tensor()


class LayerNormLinear(Linear):
    """A Linear with the norm before it: ``layer_norm_weight``, and ``layer_norm_bias`` unless it is RMSNorm."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None,
        init_method: Any = None, bias: bool = True, normalization: str = "LayerNorm", return_bias: bool = False,
        params_dtype: Any = None, parallel_mode: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            in_features, out_features, tp_group=tp_group, tp_size=tp_size, bias=bias, params_dtype=params_dtype,
            parallel_mode=parallel_mode,
        )  # fmt: skip
        # The order of registration is the order in the optimizer's buffers: norm first, as in the real module.
        linear = dict(self._parameters)
        self._parameters.clear()
        self._new("layer_norm_weight", in_features, dtype=params_dtype)
        if normalization != "RMSNorm":
            self._new("layer_norm_bias", in_features, dtype=params_dtype)
        else:
            self.layer_norm_bias = None
        self._parameters.update(linear)


class GroupedLinear(_Module):
    """One ``weightN`` (and ``biasN``) per expert."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1, get_rng_state_tracker: Any = None,
        init_method: Any = None, bias: bool = True, return_bias: bool = False, params_dtype: Any = None,
        parallel_mode: str | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        i, o = _local(in_features, out_features, parallel_mode, tp_size, tp_group)
        self.num_gemms, self.in_features, self.out_features, self.use_bias = num_gemms, i, o, bias
        for number in range(num_gemms):
            self._new(f"weight{number}", o, i, dtype=params_dtype)
            if bias:
                self._new(f"bias{number}", o, dtype=params_dtype)


class RMSNorm(_Module):
    """``weight``."""

    def __init__(
        self, hidden_size: Any = None, eps: float = 1e-5, sequence_parallel: bool = False, normalized_shape: Any = None,
        dtype: Any = None, params_dtype: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._new("weight", hidden_size or normalized_shape, dtype=dtype or params_dtype)


class LayerNorm(RMSNorm):
    """``weight`` and ``bias``."""

    def __init__(
        self, hidden_size: Any = None, eps: float = 1e-5, sequence_parallel: bool = False, normalized_shape: Any = None,
        dtype: Any = None, params_dtype: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, sequence_parallel, normalized_shape, dtype, params_dtype)
        self._new("bias", hidden_size or normalized_shape, dtype=dtype or params_dtype)


class DotProductAttention(_Module):
    """No parameters, but for the learnable softmax's ``softmax_offset``; the signature is looked at by Megatron."""

    def __init__(
        self, num_attention_heads: int = 1, kv_channels: Any = 1, num_gqa_groups: Any = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal", window_size: Any = None,
        sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker: Any = None, tp_group: Any = None,
        layer_number: Any = None, attention_type: str = "self", cp_group: Any = None, cp_global_ranks: Any = (),
        cp_stream: Any = None, softmax_scale: Any = None, softmax_type: str = "vanilla", cp_comm_type: str = "p2p",
        **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if softmax_type == "learnable":
            self._new("softmax_offset", num_attention_heads // tp_size, dtype=torch.float32)


class RMSNormGated(torch.nn.Module):
    """mamba_ssm's gated norm (mamba_ssm/ops/triton/layernorm_gated.py): one weight."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: Any = None, norm_before_gate: bool = True,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=dtype or torch.get_default_dtype()))
        self.register_parameter("bias", None)


class _AnyClass(type):
    """A class whose attributes are again such classes, so that ``te.common.recipe.Format.E4M3`` can be named."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


def _placeholder(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ImportError(f"{name} belongs to a package that is not installed here")

    return _AnyClass(name, (object,), {"__init__": refuse})


class _Package(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _placeholder(name)
        setattr(self, name, value)
        return value


def empty_package(name: str) -> ModuleType:
    """A module that has a class of every name that is asked of it."""
    return _Package(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves empty modules for packages. Last in line, so that ones which are installed win, unless it is put first."""

    def __init__(self, roots: frozenset[str]) -> None:
        self.roots = roots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == root or fullname.startswith(f"{root}.") for root in self.roots):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def stand_in_for(*packages: str) -> None:
    """Serve empty modules for packages that are installed. Before they are imported; this process only, for good."""
    sys.meta_path.insert(0, _Finder(frozenset(packages)))


def install() -> None:
    """Serve the skeleton from here on. Before megatron is imported; this process only, for good."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    installed = importlib.util.find_spec("transformer_engine") is not None
    sys.meta_path.append(_Finder(ROOTS))
    if installed:
        return
    te: Any = importlib.import_module("transformer_engine")
    pytorch: Any = importlib.import_module("transformer_engine.pytorch")
    offload: Any = importlib.import_module("transformer_engine.pytorch.cpu_offload")
    gated: Any = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated")
    te.__version__ = VERSION
    offload.get_cpu_offload_context = lambda *a, **k: (contextlib.nullcontext(), lambda x: x)
    gated.RMSNorm = RMSNormGated
    for kind in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention):
        setattr(pytorch, kind.__name__, kind)
