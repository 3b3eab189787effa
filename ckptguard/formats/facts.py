"""What a Megatron checkpoint says about its run, taken from args, run_config.yaml and content_metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptguard.core.errors import DamagedError
from ckptguard.core.index import Facts, ObjectEntry, TensorEntry
from ckptguard.core.problems import Problem
from ckptguard.formats.chunks import Reader
from ckptguard.formats.pickles import as_plain

# axis -> the Megatron argument that holds its size
AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
}
RUN_CONFIG = "run_config.yaml"


def layout_from(values: Mapping[str, object]) -> dict[str, int]:
    """Sizes of the parallel axes among training arguments or a run_config's ``model`` part."""
    out = {}
    for axis, name in AXES.items():
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            out[axis] = value
    world = values.get("world_size")
    model = out.get("tp", 1) * out.get("pp", 1) * out.get("cp", 1)
    if "dp" not in out and isinstance(world, int) and world % model == 0:
        out["dp"] = world // model
    return out


def read_run_config(reader: Reader) -> tuple[dict[str, Any], list[Problem]]:
    """Bridge's run_config.yaml as plain values; an unreadable one is a problem, not a failure."""
    if RUN_CONFIG not in reader.files.listing:
        return {}, []
    import yaml

    class Plain(yaml.SafeLoader):
        """Knows no tag but YAML's own; any other is read as the plain value under it."""

    def untagged(loader: yaml.SafeLoader, _suffix: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node) if isinstance(node, yaml.ScalarNode) else None

    Plain.add_multi_constructor("", untagged)
    try:
        value = yaml.load(reader.files.read(RUN_CONFIG).decode(), Loader=Plain)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        return {}, [Problem("unreadable", f"{RUN_CONFIG}: not YAML ({error})", file=RUN_CONFIG)]
    return (value if isinstance(value, dict) else {}), []


def gather(
    common: Mapping[str, Any],
    run_config: Mapping[str, Any],
    *,
    version: str | None,
    optimizer: str | None,
    extra: Mapping[str, object],
) -> Facts:
    """Puts together what common state and run_config say; args win where both speak."""
    args = as_plain(common.get("args", {}))
    args = args if isinstance(args, dict) else {}
    content = as_plain(common.get("content_metadata", {}))
    content = content if isinstance(content, dict) else {}
    model = run_config.get("model")
    layout = layout_from(model if isinstance(model, Mapping) else {}) | layout_from(args)
    iteration = common.get("iteration")
    stated = content.get("distrib_optim_sharding_type")
    return Facts(
        version=version,
        iteration=iteration if isinstance(iteration, int) else None,
        layout=layout,
        optimizer_format=str(stated) if stated else optimizer,
        args=args,
        run_config=dict(run_config),
        content_metadata=content,
        extra=dict(extra),
    )


def optimizer_format(names: Iterable[str], mcore_data: Mapping[str, Any]) -> str | None:
    """The optimizer's format on disk, told by its keys (FORMATS: distrib_optimizer.py of core 0.8 to 0.19).

    ``optimizer.state.fp32_param`` was the model-space format with flattened ranges, ``optimizer.state.param`` is today's
    ``fully_reshardable``; bucket keys with tensors are ``dp_reshardable``, one object per group ``dp_zero_gather_scatter``.
    """
    names = list(names)
    if any(".state.module.module." in n for n in names):
        return "fsdp_dtensor"
    if any(".param_state" in n and "dp_group_idx" in n for n in names):
        return "dp_zero_gather_scatter"
    if any("dp_group_idx" in n and ".bucket_idx_" in n for n in names):
        return "dp_reshardable"
    if any("gbuf_idx_" in n and "dp_group_idx" in n for n in names):
        return "fully_sharded_bucket_space"
    if any("optimizer.state.fp32_param." in n for n in names):
        return "fully_sharded_model_space"
    if any("optimizer.state.param." in n for n in names):
        return "fully_sharded_model_space" if mcore_data else "fully_reshardable"
    return None


def read_value(reader: Reader, entry: ObjectEntry, problems: list[Problem]) -> Any:
    """An object's inert value, or None with its problems noted."""
    try:
        return reader.object_value(entry)
    except DamagedError as error:
        problems.extend(
            error.problems or [Problem("unreadable", error.message, file=entry.span.file, tensor=entry.name)]
        )
        return None


def kind_of(entry: TensorEntry) -> str:
    """What a tensor is for: "weights", "masters", "moments" or "optimizer other"."""
    return kind_of_name(entry.name)


def kind_of_name(name: str) -> str:
    """As ``kind_of``, by name alone; names of Megatron's torch_dist, DCP and legacy files."""
    if not _is_optimizer(name):
        return "weights"
    parts = name.replace(":", ".").replace("/", ".").split(".")
    if "exp_avg" in parts or "exp_avg_sq" in parts or "momentum_buffer" in parts:
        return "moments"
    if "fp32_param" in parts or "param" in parts or "master_param" in parts or "fp32_from_fp16_params" in parts:
        return "masters"
    return "optimizer other"


def _is_optimizer(name: str) -> bool:
    return name.startswith(("optimizer.", "chained_")) or "/distrib_optim.pt:" in name or ".pt:optimizer." in name
