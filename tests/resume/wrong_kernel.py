"""Plugin for recorded Megatron processes: rank 1's matrix products in one module have one wrong bit in step 2."""

from __future__ import annotations

from typing import Any

from ckptguard.testing.resume_step_plants import flip_memory, replace_kernel

MODULE = "decoder.layers.0.mlp.linear_fc1"
STEP = 2


def plant(recorder: Any, _: str | None) -> None:
    """Called when the recorder starts."""
    if recorder.rank != 1:
        return
    now = {"step": 0, "inside": False}

    def loaded(recorder: Any, _: int, __: Any) -> None:
        (chunk,) = recorder.modules
        module = next(module for name, module in chunk.named_modules() if name.endswith(MODULE))
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            now["inside"] = now["step"] == STEP
            try:
                return forward(*args, **kwargs)
            finally:
                now["inside"] = False

        module.forward = watched

    def product(right: Any, *args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        if now["inside"]:
            flip_memory(out)
        return out

    recorder.before["loaded"].append(loaded)
    recorder.before["step"].append(lambda _, step, __: now.update(step=step))
    replace_kernel("aten::mm", product)
