"""Which plant makes which fault of ``resume_faults``."""

from __future__ import annotations

from typing import Any

from ckptguard.testing import resume_state_plants as state
from ckptguard.testing import resume_step_plants as step
from ckptguard.testing.resume_faults import PREPARED
from ckptguard.testing.resume_peers import hash_items
from ckptguard.testing.resume_state_plants import Plant

_EXPERT = r"\.local_experts\.0\."
_FIRST_CHUNK, _SECOND_CHUNK = "chunk 0 decoder", "chunk 1 decoder"


def _nan_payload(element_bytes: int) -> int:
    return 2


def _prepare(recorder: Any) -> None:
    for plant in (
        state.cuda_apart,
        state.corner_values,
        state.drawing,
        step.reads_empty,
        step.scaled_modules,
    ):
        plant(recorder)


PLANTS: dict[str, Plant] = {
    PREPARED: _prepare,
    "hash_tensor": hash_items,
    "exp_avg-bit": state.flipped_bit("optimizer", "^optimizer exp_avg chunk"),
    "exp_avg_sq-bit": state.flipped_bit("optimizer", "^optimizer exp_avg_sq chunk"),
    "master-bit": state.flipped_bit("master", "^master"),
    "sign-of-zero": state.corner_bits("parameter", 0, state.sign_bit),
    "nan-payload": state.corner_bits("master", 1, _nan_payload),
    "paired-bits": state.flipped_bit("optimizer", "^optimizer exp_avg chunk", elements=2),
    "swapped-elements": state.swapped_elements("parameter", "layers.*weight"),
    "swapped-experts": state.swapped_items(("master", "optimizer", "parameter"), _EXPERT, ".local_experts.1."),
    "expert-bias-bf16": state.narrowed_buffer("expert_bias"),
    "missing-key": step.missing_key("output_layer.weight"),
    "vpp-chunks-swapped": state.swapped_items(("master", "parameter"), _FIRST_CHUNK, _SECOND_CHUNK),
    "amax-history-zeroed": step.scaling_changed("amax_history"),
    "fp8-scale-changed": step.scaling_changed("scale"),
    "emptied-group": state.groups_changed(state.emptied_group),
    "swapped-groups": state.groups_changed(state.swapped_groups),
    "copied-max-lr": state.groups_changed(state.copied_field("max_lr")),
    "copied-wd-mult": state.groups_changed(state.copied_field("wd_mult")),
    "adam-step-plus": state.adam_step(1),
    "adam-step-minus": state.adam_step(-1),
    "stale-weight-decay": state.groups_changed(state.stale_weight_decay),
    "scheduler-plus": state.number("scheduler", "num_steps", 1),
    "growth-tracker-plus": state.scaler_attribute("_growth_tracker", 1),
    "growth-tracker-minus": state.scaler_attribute("_growth_tracker", -1),
    "hysteresis-minus": state.scaler_attribute("_hysteresis_tracker", -1),
    "tp-rng-swapped": state.generators_swapped("model-parallel-rng"),
    "torch-rng-omitted": state.reseeded("torch"),
    "numpy-rng-omitted": state.reseeded("numpy"),
    "python-rng-omitted": state.reseeded("python"),
    "samples-plus": step.samples_moved(1),
    "samples-minus": step.samples_moved(-1),
    "skipped-batch": step.batches(step.skip_one),
    "repeated-batch": step.batches(step.repeat_one),
    "wrong-bit": step.wrong_bit("aten::mm", "layers.1.mlp.linear_fc1"),
    "scatter-order": step.other_order("layers.0.mlp"),
    "reduction-order": step.other_reduction_order,
    "dropped-gradient": step.dropped_contribution(1),
    "skipped-parameter-sync": step.skipped_parameter_sync,
    "hooks-stay-off": step.hooks_stay_off,
    "empty-read": step.full_memory,
    "less-precise-products": step.less_precise,
    "torch-rng-draw": state.when_loaded(state.one_draw, ranks=None),
}
