"""The tiny trainer, with optimizer state in the form ``dp_zero_gather_scatter``, which no flag asks for any more.

The code that writes it is Megatron's own: ``DistributedOptimizer.sharded_param_state_dp_zero``.
"""

from __future__ import annotations

from typing import Any

from ckptguard.testing import tiny_trainer

_config = tiny_trainer._config


def _with_gathered_state(args: Any) -> Any:
    from megatron.training import checkpointing

    original = checkpointing._build_sharded_state_dict_metadata

    def metadata(*given: Any, **named: Any) -> dict[str, Any]:
        return original(*given, **named) | {"distrib_optim_sharding_type": "dp_zero_gather_scatter"}

    checkpointing._build_sharded_state_dict_metadata = metadata
    return _config(args)


if __name__ == "__main__":
    tiny_trainer._config = _with_gathered_state
    tiny_trainer.main()
