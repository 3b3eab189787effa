"""What a resumed Megatron run holds: SHA-256 of its whole state right after loading, and the losses of its steps, by rank.

``python -m ckptguard.testing.state_digests --digests=DIR ...`` is the tiny trainer with two of Megatron's functions watched;
every rank writes ``DIR/rank_N.json``. Two runs that end in equal files loaded the same state and computed the same from it.
Hybrid models have Transformer Engine's order of parameters (``hybrid_te_order``), which the tiny trainer's own have not; give
:data:`TRAINER` to the functions of ``recipes`` to have it elsewhere too.

Nothing heavy is imported at the top, as in the trainer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ckptguard.testing.recipes import TIMEOUT_SECONDS, Recipe, resume

if TYPE_CHECKING:
    import torch

SWITCH = "--digests="
TRAINER = "ckptguard.testing.state_digests"


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """A run that went on from a checkpoint.

    Attributes:
        loaded: By rank: everything it held right after loading, by name; tensors as digests.
        steps: By rank: of each step the losses (full precision; last pipeline stage only) and the gradient norm.
        saved: The iteration directory that it wrote in the end.
    """

    loaded: tuple[dict[str, Any], ...]
    steps: tuple[list[Any], ...]
    saved: Path


def resume_digested(
    src: Path, recipe: Recipe, out: Path, *, steps: int = 2, timeout_seconds: float = TIMEOUT_SECONDS
) -> Resumed:
    """Have Megatron load ``src`` under the recipe's layout, tell its state, train ``steps`` more and save to ``out``.

    Raises:
        MegatronRunError: Megatron failed or took too long.
    """
    longer = dataclasses.replace(recipe, steps=recipe.steps + steps)
    digests = out / "digests"
    digests.mkdir(parents=True)
    resume(src, longer, out, trainer=TRAINER, switches=(f"{SWITCH}{digests}",), timeout_seconds=timeout_seconds)
    return read_resumed(out)


def read_resumed(out: Path) -> Resumed:
    """What ``resume_digested`` returned when it wrote ``out``."""
    ranks = sorted((out / "digests").glob("rank_*.json"), key=lambda path: int(path.stem.partition("_")[2]))
    found = [json.loads(path.read_text()) for path in ranks]
    (saved,) = out.glob("iter_*")
    return Resumed(tuple(rank["loaded"] for rank in found), tuple(rank["steps"] for rank in found), saved)


def differences(one: Resumed, other: Resumed) -> list[str]:
    """What differs between two runs of one layout, in words; empty if nothing does."""
    if len(one.loaded) != len(other.loaded):
        return [f"{len(one.loaded)} and {len(other.loaded)} ranks"]
    out = []
    for rank, (a, b) in enumerate(zip(one.loaded, other.loaded, strict=True)):
        out += [
            f"rank {rank} {name}: {a.get(name)} and {b.get(name)}"
            for name in sorted({*a, *b})
            if a.get(name) != b.get(name)
        ]
    for rank, (a_steps, b_steps) in enumerate(zip(one.steps, other.steps, strict=True)):
        out += [f"rank {rank}, steps: {a_steps} and {b_steps}"] if a_steps != b_steps else []
    return out


def digest(tensor: torch.Tensor) -> str:
    """Shape, dtype and SHA-256 of the elements in row-major order."""
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else digest(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else repr(value)


def _names(model: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of all model chunks."""
    for number, chunk in enumerate(model):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"chunk {number} {name.replace('module.', '')}", tensor


def describe(model: list[Any], optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The state of this rank by name: tensors as digests, numbers as they are."""
    import torch
    from megatron.training import get_args

    args = get_args()
    names = {tensor: name for name, tensor in _names(model)}
    out: dict[str, Any] = {f"model {name}": digest(tensor) for tensor, name in names.items()}
    for number, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        where = f"optimizer {number}"
        for param in part.model_param_group_index_map:
            for kind, state in part._get_main_param_and_optimizer_states(param).items():
                out[f"{where} {kind} of {names[param]}"] = digest(state)
        for at, group in enumerate(part.optimizer.param_groups):
            out[f"{where} group {at}"] = _plain({key: value for key, value in group.items() if key != "params"})
        scaler = getattr(part, "grad_scaler", None)
        out[f"{where} scaler"] = _plain(scaler.state_dict()) if scaler else None
    out["scheduler"] = _plain(scheduler.state_dict())
    counted = ("iteration", "consumed_train_samples", "consumed_valid_samples", "num_floating_point_operations_so_far")
    out |= {name: getattr(args, name) for name in counted}
    out["rng"] = digest(torch.get_rng_state())
    return out


def _watch(folder: Path) -> Any:
    """A patch of ``megatron.training.training``: write what is loaded, and what every step returns."""

    def patch(module: ModuleType) -> None:
        told: dict[str, Any] = {"steps": []}
        setup, step = module.setup_model_and_optimizer, module.train_step

        def write() -> None:
            import torch

            (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(told, indent=1))

        def watched_setup(*args: Any, **kwargs: Any) -> Any:
            made = setup(*args, **kwargs)
            told["loaded"] = describe(*made)
            write()
            return made

        def watched_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            losses, skipped, grad_norm = result[0], result[1], result[5]
            told["steps"].append(_plain({"losses": losses, "skipped": skipped, "grad_norm": grad_norm}))
            write()
            return result

        module.setup_model_and_optimizer, module.train_step = watched_setup, watched_step  # type: ignore[attr-defined]

    return patch


def main() -> None:
    """Run the tiny trainer, watched where it is asked for."""
    folders = [Path(a.removeprefix(SWITCH)) for a in sys.argv if a.startswith(SWITCH)]
    hybrid = any(a.startswith("--hybrid-layer-pattern") for a in sys.argv)
    sys.argv = [a for a in sys.argv if not a.startswith(SWITCH)]

    from ckptguard.core.after_import import after_import
    from ckptguard.testing import cpu_stand_in, tiny_trainer

    cpu_stand_in.install()
    for folder in folders:
        after_import("megatron.training.training", _watch(folder))
    if hybrid:
        from ckptguard.testing import hybrid_cpu, hybrid_te_order

        hybrid_cpu.hybrid_stack_spec = hybrid_te_order.hybrid_stack_spec
        hybrid_cpu._local_norms = hybrid_te_order.final_norm
    tiny_trainer.main()


if __name__ == "__main__":
    main()
