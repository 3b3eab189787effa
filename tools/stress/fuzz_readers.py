"""Damaged files without a seal: whatever is done to them, every command ends in a result or in one clear error.

Bytes of headers, indexes and pickles are flipped, cut, repeated or overwritten at random; then the checkpoint is opened,
verified, fingerprinted and summarised. Anything but a CkptguardError is a miss. Exits 1 on any.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from ckptguard.core.errors import CkptguardError
from ckptguard.engine.diff import diff_checkpoints
from ckptguard.engine.fingerprints import fingerprint_checkpoint
from ckptguard.engine.summary import summarise
from ckptguard.engine.verify import verify
from ckptguard.formats.registry import open_checkpoint

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SOURCES = [
    "megatron-0.12/dense_tp2pp2_model_space/iter_0000002",
    "megatron-0.12/dense_tp2pp2_legacy_torch/iter_0000002",
    "megatron-0.15/dense_tp2pp2_dp_reshardable/iter_0000002",
    "megatron-0.19/dense_tp2pp2_integrity/iter_0000002",
]


def snapshot(path: Path) -> None:
    """A small sharded safetensors snapshot with an index and a config."""
    import json

    import numpy as np
    from safetensors.numpy import save_file

    path.mkdir()
    names = {}
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({f"layer.{number}.{k}": np.ones((4, 6), np.float32) for k in "ab"}, path / file, {"format": "pt"})
        names |= {f"layer.{number}.{k}": file for k in "ab"}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 384}, "weight_map": names})
    )
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 100}))


def spoil(rng: random.Random, data: bytearray) -> None:
    """Changes a few bytes, mostly near the ends, where headers are."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        if not data:
            return
        near = min(len(data), 3000)
        at = rng.choice([rng.randrange(near), len(data) - 1 - rng.randrange(near), rng.randrange(len(data))])
        kind = rng.randrange(6)
        if kind <= 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at] = rng.choice([0, 255, 0x2E, 0x52, 0x62, 0x80, 0x7B])
        elif kind == 3:
            del data[at : at + rng.choice([1, 4, 100])]
        elif kind == 4:
            data[at:at] = data[at : at + rng.choice([1, 8, 64])]
        else:
            data[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), (1 << 62).to_bytes(8, "little")])


def read_everything(path: Path, intact: Path) -> str:
    """Runs what the commands run; the name of the outcome."""
    report = verify(path)
    with open_checkpoint(path) as checkpoint, open_checkpoint(intact) as other:
        summarise(checkpoint.index).as_dict()
        fingerprint_checkpoint(checkpoint)
        diff_checkpoints(checkpoint, other)
    return "damage reported" if report.damaged else "read"


def main() -> None:
    """Runs the trials and prints how they ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, outcomes, misses, start = random.Random(options.seed), Counter(), [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        places = []
        for number, name in enumerate([*SOURCES, ""]):
            intact, path = Path(folder, f"{number}-intact"), Path(folder, str(number))
            shutil.copytree(FIXTURES / name, intact) if name else snapshot(intact)
            shutil.copytree(intact, path)
            places.append((intact, path, [p for p in path.rglob("*") if p.is_file()]))
        for _ in range(options.trials):
            intact, path, files = rng.choice(places)
            file = rng.choice(files)
            before = file.read_bytes()
            data = bytearray(before)
            spoil(rng, data)
            file.write_bytes(data)
            try:
                outcomes[read_everything(path, intact)] += 1
            except CkptguardError as error:
                outcomes[type(error).__name__] += 1
            except Exception:  # noqa: BLE001 - every other exception is what this looks for
                misses.append(f"{path.name}/{file.name}:\n{traceback.format_exc()}")
            file.write_bytes(before)
    print(f"{options.trials} trials in {time.perf_counter() - start:.0f} s:", dict(outcomes))
    print(f"{len(misses)} misses", *misses[:5], sep="\n")
    sys.exit(bool(misses))


if __name__ == "__main__":
    main()
