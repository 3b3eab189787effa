"""The peer of ``ckptguard reshard``: Megatron's own way. A process per rank loads a checkpoint in the new layout and saves it.

    python tools/benchmarks/megatron_reshard.py ROOT OUT_DIR --size 2GiB --tp 4

ROOT is of ``make_megatron`` with the same size, in ``fully_reshardable`` form. The processes meet over gloo, on CPUs; they
build model and optimizer, and hold the whole checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import make_megatron
from make_snapshots import size_in_bytes

from ckptguard.testing.recipes import resave

_TIMEOUT_SECONDS = 3600.0


def main() -> None:
    """Parses the command line and has Megatron convert."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--size", type=size_in_bytes, required=True, help="as given to make_megatron.py")
    for axis in ("tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    options = parser.parse_args()
    recipe = make_megatron.recipe(options.size, tp=options.tp, pp=options.pp, optimizer="fully_reshardable")
    print(resave(options.root, recipe, options.out_dir, timeout_seconds=_TIMEOUT_SECONDS))


if __name__ == "__main__":
    main()
