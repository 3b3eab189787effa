"""Determinism settings: what is asked for, of whom, and what a resumed run may not be told."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ckptguard.core.errors import UsageError
from ckptguard.resume.settings import check, contradictions, fixed_environment

_GOOD = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONHASHSEED": "0",
}
_FLAGS = ["--deterministic-mode", "--no-gradient-accumulation-fusion"]


def _names(framework="megatron-lm", arguments=_FLAGS, environment=_GOOD, gpu=True, versions=None, hidden=False):
    found = check(framework, arguments, environment, gpu=gpu, versions=versions or {}, hidden=hidden)
    return {setting.name: setting.severity for setting in found}


def test_nothing_is_asked_where_all_is_set():
    assert _names() == {}
    assert _names("bridge", ["model.deterministic_mode=true"]) == {}
    assert _names("torch", []) == {}


def test_without_a_gpu_only_python_is_asked_about():
    assert _names(arguments=[], environment={}, gpu=False) == {"PYTHONHASHSEED": "advised"}
    assert _names(arguments=[], environment={"PYTHONHASHSEED": "random"}, gpu=False) == {"PYTHONHASHSEED": "advised"}


def test_megatron_sets_variables_itself_in_deterministic_mode():
    unset = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONHASHSEED": "1"}
    assert _names(environment=unset) == {}
    required = dict.fromkeys(("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG"), "required")
    assert _names("bridge", ["model.deterministic_mode=true"], unset) == required
    assert _names("torch", [], unset) == required
    assert _names(arguments=_FLAGS[1:], environment=unset) == required | {"--deterministic-mode": "required"}


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("NCCL_ALGO", "Tree", False),
        ("NCCL_ALGO", "Ring,Tree", False),
        ("NCCL_ALGO", "", False),
        ("NCCL_ALGO", "Ring, CollnetDirect", True),
        ("NCCL_ALGO", "^NVLS", True),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", False),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", True),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2", False),
        ("MAMBA_DETERMINISTIC", "0", False),
        ("MAMBA_DETERMINISTIC", "1", True),
        ("CAUSAL_CONV1D_DETERMINISTIC", "0", False),
    ],
)
def test_values_of_variables(name, value, good):
    assert _names(environment=_GOOD | {name: value}) == ({} if good else {name: "required"})


def _determinism():
    """Megatron-LM's module of that name, by itself: the package around it imports all of Megatron."""
    root = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0]).parent
    spec = importlib.util.spec_from_file_location("determinism", root / "training" / "determinism.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_values_are_good_as_for_megatron():
    from ckptguard.resume import settings

    determinism = _determinism()
    assert determinism.ACCEPTED_NCCL_ALGO_TOKENS == settings._NCCL_TOKENS
    assert determinism.ACCEPTED_ENV_VAR_VALUES["CUBLAS_WORKSPACE_CONFIG"] == set(settings._CUBLAS)
    variables = determinism.DETERMINISM_ENV_VAR_DEFAULTS
    assert fixed_environment(check("torch", [], {}, gpu=True, versions={})).items() >= variables.items()
    assert set(determinism.ARG_VALUES_REQUIRED_FOR_DETERMINISM) == {"cross_entropy_loss_fusion", "tp_comm_overlap"}


def test_flags():
    assert _names(arguments=[]) == {"--deterministic-mode": "required", "--no-gradient-accumulation-fusion": "advised"}
    assert _names(arguments=[], hidden=True) == {"--deterministic-mode": "advised"}
    assert _names(arguments=[*_FLAGS, "--tp-comm-overlap"]) == {"--tp-comm-overlap": "required"}
    assert _names(arguments=[*_FLAGS, "--cross-entropy-loss-fusion"]) == {"--cross-entropy-loss-fusion": "required"}
    assert _names("bridge", []) == {"model.deterministic_mode": "advised"}  # a recipe may set it
    assert _names("bridge", ["model.deterministic_mode=false"]) == {"model.deterministic_mode": "required"}
    overlap = ["model.deterministic_mode=true", "comm_overlap.tp_comm_overlap=true"]
    assert _names("bridge", overlap) == {"comm_overlap.tp_comm_overlap": "required"}


def test_kernels_of_state_space_models_and_of_new_gpus():
    hybrid = [*_FLAGS, "--hybrid-layer-pattern", "M*"]
    assert _names(arguments=hybrid) == {"TRITON_CACHE_AUTOTUNING": "advised"}
    environment = _GOOD | {"TRITON_CACHE_AUTOTUNING": "1"}
    assert _names(arguments=hybrid, environment=environment, versions={"causal-conv1d": "1.5.2"}) == {
        "causal-conv1d": "required"
    }
    assert _names(arguments=hybrid, environment=environment, versions={"causal-conv1d": "1.6.0"}) == {}
    old = {"cudnn": "9.10.2.21"}
    assert _names(versions=old | {"compute-capability": "10.0"}) == {"cuDNN": "required"}
    assert _names(versions=old | {"compute-capability": "9.0"}) == _names(versions=old) == {}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in _names(environment=_GOOD | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    fsdp = [*_FLAGS, "--use-megatron-fsdp"]  # which wants more than one
    assert _names(arguments=fsdp, environment=_GOOD | {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == {}


def test_what_can_be_fixed_is_fixed():
    found = check("megatron-lm", ["--deterministic-mode"], {"NCCL_ALGO": "Tree"}, gpu=True, versions={})
    fixed = fixed_environment(found)
    assert fixed == {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONHASHSEED": "0"}
    assert all(setting.why for setting in found)
    assert _names(environment={"NCCL_ALGO": "Tree"} | fixed) == {}


@pytest.mark.parametrize(
    ("framework", "arguments", "resume_args", "resume_environment", "message"),
    [
        (
            "megatron-lm",
            [],
            [],
            {"NCCL_ALGO": "Tree"},
            "NCCL_ALGO is Ring in the reference and Tree in the resumed run",
        ),
        ("torch", [], [], {"OMP_NUM_THREADS": "4"}, "OMP_NUM_THREADS is unset in the reference and 4"),
        ("megatron-lm", ["--lr", "1"], ["--lr", "2"], {}, "--lr is 1 in the reference and 2"),
        ("megatron-lm", [], ["--bf16"], {}, "--bf16 is unset in the reference and set"),
        ("bridge", ["rng.seed=1"], ["rng.seed=2"], {}, "rng.seed is 1"),
    ],
)
def test_a_resumed_run_that_computes_something_else_is_refused(
    framework, arguments, resume_args, resume_environment, message
):
    with pytest.raises(UsageError, match=message):
        contradictions(framework, arguments, {"NCCL_ALGO": "Ring"}, resume_args, resume_environment)


def test_a_resumed_run_may_be_laid_out_differently():
    arguments = ["--lr", "1", "--tensor-model-parallel-size", "2"]
    resumed = ["--tensor-model-parallel-size", "1", "--micro-batch-size", "2", "--lr", "1", "--no-load-rng"]
    contradictions("megatron-lm", arguments, _GOOD, resumed, {"NCCL_ALGO": "Ring", "MY_VARIABLE": "1"})
