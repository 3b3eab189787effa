"""A user's own launch line for Megatron-LM, proved as a user would; longer ones are in tools/stress/resume_real.py."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

from ckptguard.testing.cpu_stand_in import site_directory
from ckptguard.testing.recipes import CPU_FLAGS

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "fixtures" / "text" / "the_ferry"
FLAGS = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32
--max-position-embeddings 32 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --lr-decay-iters 100 --train-iters 100 --eval-iters 0 --eval-interval 1000
--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 511"""


def test_an_unmodified_script_resumes_bit_for_bit(tmp_path: Path) -> None:
    script = ROOT / "tests" / "resume" / "pretrain_gpt.py"
    assert "ckptguard" not in script.read_text().partition('"""\n\n')[2]
    prove = [
        sys.executable,
        "-m",
        "ckptguard",
        "verify-resume",
        "--steps",
        "3",
        "--save-at",
        "2",
        "--no-load-arm",
        "--json",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*prove, "--work", tmp_path / "work", "--", *torchrun, script, *CPU_FLAGS, *FLAGS.split()],
        env=os.environ | {"PYTHONPATH": f"{site_directory()}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["word"] == "equal"
    assert [(arm["name"], arm["exit_code"]) for arm in found["arms"]] == [("reference", 0), ("save", 0), ("resume", 0)]
    assert found["facts"]["framework"] == "Megatron-LM"
    assert {group for group, count in found["observed"] if count} >= {"loss", "gradient", "master", "optimizer", "rng"}


def test_the_text_is_in_megatron_s_indexed_format() -> None:
    index, tokens = TEXT.with_suffix(".idx").read_bytes(), TEXT.with_suffix(".bin").read_bytes()
    magic, version, dtype, sequences, documents = struct.unpack_from("<9sQBQQ", index)
    assert (magic, version, dtype) == (b"MMIDIDX\x00\x00", 1, 8)  # uint16
    paragraphs = [part for part in TEXT.with_suffix(".txt").read_text().split("\n\n") if part.strip()]
    assert sequences == documents - 1 == len(paragraphs)
    lengths = struct.unpack_from(f"<{sequences}i", index, struct.calcsize("<9sQBQQ"))
    assert sum(lengths) * 2 == len(tokens)
    values = struct.unpack(f"<{sum(lengths)}H", tokens)
    ends = [sum(lengths[: n + 1]) - 1 for n in range(sequences)]
    assert [place for place, value in enumerate(values) if value == 0] == ends
    assert max(values) < 49152
