"""The parallel layout that options and a launch line say: Megatron-LM's flags, Bridge's overrides. Pure.

Names are those of megatron/core/model_parallel_config.py and transformer_config.py, and of megatron/training/arguments.py
(megatron-core 0.19.2); Bridge takes the fields of the first two under ``model.`` (bridge/training/config.py, 0.6.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptguard.core.errors import UsageError
from ckptguard.layout.layouts import Layout
from ckptguard.megatron.launch_line import Framework, LaunchLine
from ckptguard.megatron.run_flags import flag_value, override_value

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_LM_STAGES = {
    "first_pp_layers": "decoder_first_pipeline_num_layers",
    "last_pp_layers": "decoder_last_pipeline_num_layers",
    "vpp": "num_virtual_stages_per_pipeline_rank",
}
_BRIDGE_STAGES = {
    "first_pp_layers": "num_layers_in_first_pipeline_stage",
    "last_pp_layers": "num_layers_in_last_pipeline_stage",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_LM_SWITCHES = {
    "count_embedding": "--account-for-embedding-in-pipeline-split",
    "count_loss": "--account-for-loss-in-pipeline-split",
}


@dataclass(frozen=True, slots=True)
class LayoutSaid:
    """What is known of the layout under which a run loads.

    Attributes:
        layout: The layout; None: the one that the checkpoint was saved with, unless ``unknown``.
        unknown: Why it cannot be known; "" if it is.
        note: What is taken for granted, for people; "" for nothing.
    """

    layout: Layout | None = None
    unknown: str = ""
    note: str = ""


def layout_said(axes: Mapping[str, Any], line: LaunchLine | None, framework: Framework | None) -> LayoutSaid:
    """The layout of a run.

    Args:
        axes: Fields of ``Layout`` that were given as options; they come before what the line says.
        line: How the run is started, if that is known.
        framework: Who trains, if that is known.

    Raises:
        UsageError: A size in the line is not a number.
    """
    if line is not None and line.wrapper is None and framework == "megatron-lm":
        return _of_megatron_lm(axes, line.arguments)
    bridge = framework == "bridge"
    said: dict[str, Any] = {}
    if line is not None:
        said = _bridge_sizes(line.arguments) if bridge else _sizes(line.arguments, {})
    if axes:
        return LayoutSaid(Layout(**{**said, **axes}))
    if said:
        where = "in the recipe" if bridge else f"in {line.wrapper or line.script}"  # type: ignore[union-attr]
        return LayoutSaid(unknown=f"sizes that stand {where} are not seen (give all with --tp, --pp, ...)")
    note = "taken as saved; --tp, --pp, ... say otherwise" if framework != "torch" else ""
    return LayoutSaid(note=note)


def _of_megatron_lm(axes: Mapping[str, Any], arguments: Sequence[str]) -> LayoutSaid:
    """Sizes are 1 where nothing is said, unless the checkpoint's are asked for."""
    if not axes and flag_value(arguments, "--use-mp-args-from-checkpoint-args") is not None:
        return LayoutSaid()
    if not axes and flag_value(arguments, "--yaml-cfg") is not None:
        return LayoutSaid(unknown="it stands in the file that --yaml-cfg names (give it with --tp, --pp, ...)")
    if not axes and "|" in (flag_value(arguments, "--hybrid-layer-pattern") or ""):
        return LayoutSaid(unknown="--hybrid-layer-pattern cuts the layers into stages")
    said = _sizes(arguments, _LM_STAGES)
    said |= {name: flag_value(arguments, flag) is not None for name, flag in _LM_SWITCHES.items()}
    said["pp_layout"] = flag_value(arguments, "--pipeline-model-parallel-layout") or None
    if "vpp" not in said:
        said["vpp"] = _virtual_stages(arguments, said)
    return LayoutSaid(Layout(**{**said, **axes}))


def _virtual_stages(arguments: Sequence[str], said: Mapping[str, Any]) -> int:
    """megatron/training/arguments.py ``validate_args``, 0.19.2: how many stages of so many layers a pipeline rank has."""
    names = ("--num-layers-per-virtual-pipeline-stage", "--num-layers")
    each, layers = ((name, flag_value(arguments, name)) for name in names)
    if each[1] is None or layers[1] is None:
        return 1
    counted = _number(layers[0], layers[1]) + said["count_embedding"] + said["count_loss"]
    return int(max(1, counted // said.get("pp", 1) // _number(each[0], each[1])))


def _sizes(arguments: Sequence[str], stages: Mapping[str, str]) -> dict[str, Any]:
    """What Megatron-LM's flags say."""
    return _said(lambda flag: flag_value(arguments, flag), "--{}", stages)


def _bridge_sizes(arguments: Sequence[str]) -> dict[str, Any]:
    """What Bridge's overrides say; what a recipe says does not stand in a line."""

    def value(name: str) -> str | None:
        found = override_value(arguments, name)
        return None if found == "null" else found

    return _said(value, "model.{}", _BRIDGE_STAGES)


def _said(value: Callable[[str], str | None], form: str, stages: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, name in {**_SIZES, **stages}.items():
        flag = form.format(name.replace("_", "-") if form.startswith("--") else name)
        text = value(flag)
        if text is not None:
            found[field] = _number(flag, text)
    return found


def _number(flag: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(
            f"{flag} is {text!r} in the launch line, not a size",
            next_step="Write the number, or give the layout: --tp, --pp, ...",
        )
    return int(text)
