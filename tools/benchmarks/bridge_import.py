"""The peer of ``ckptguard import``: Megatron-Bridge's own mapping fills a CPU model, Megatron's own save writes it.

    python tools/benchmarks/bridge_import.py SNAPSHOT OUT_DIR

TP1 PP1 in one process, Transformer Engine by ckptguard's skeleton. Whole models only: what Bridge offers without a GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")


def model_of(snapshot: Path) -> Any:
    """The model with a snapshot's weights, made by Bridge."""
    import torch
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(str(snapshot), dtype=torch.bfloat16)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.pipeline_dtype = provider.params_dtype = torch.bfloat16
    provider.bf16 = provider.use_cpu_initialization = True
    provider.perform_initialization = provider.gradient_accumulation_fusion = False
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return model


def main() -> None:
    """Imports a snapshot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("out_dir", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from ckptguard.megatron import te_skeleton
    from ckptguard.testing import cpu_stand_in

    cpu_stand_in.install()
    te_skeleton.install()
    import megatron.core  # noqa: F401 -- before Bridge: it decides what is there
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meeting", rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        model = model_of(options.snapshot)
        options.out_dir.mkdir(parents=True)
        dist_checkpointing.save(model.sharded_state_dict(), str(options.out_dir))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
