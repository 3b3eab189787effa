"""The Triton kernel against the CPU path, without a GPU: in Triton's interpreter, and compiled for real targets.

What these tests cannot prove is that the compiled code computes what the interpreter computes, and how fast it is.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from triton_cases import Case, tensor

from ckptguard.core.dtypes import BY_NAME
from ckptguard.fingerprint.live import fingerprint_tensor

HERE = Path(__file__).parent
ROOT = str(HERE.parents[1])

EDGES = [
    Case("float32", (), (), ()),
    Case("complex128", (), (), ()),
    Case("bfloat16", (1,), (0,), (1,)),
    Case("int64", (5000,), (0,), (5000,)),
    Case("int64", (20000,), (4090,), (8200,)),
    Case("uint8", (3, 9001), (0, 0), (3, 9001)),
    Case("bfloat16", (40, 4096), (0, 0), (40, 4096)),
    Case("bfloat16", (40, 4097), (3, 4095), (37, 2)),
    Case("float64", (9000, 3), (100, 1), (8800, 2)),
    Case("float16", (17, 5, 64), (1, 0, 0), (16, 5, 64)),
    Case("float8_e4m3fn", (17, 5, 64), (1, 2, 30), (16, 3, 34)),
    Case("float4_e2m1fn_x2", (5, 4, 3, 2), (0, 0, 0, 0), (5, 4, 3, 2)),
    Case("bool", (2, 2, 2, 2, 2, 2, 2), (0,) * 7, (2,) * 7),
    Case("complex64", (30, 70), (2, 3), (11, 66)),
    Case("int16", (1 << 40, 70), ((1 << 40) - 5, 0), (5, 70)),
    Case("int16", (70, 1 << 40), (2, (1 << 40) - 9), (5, 9)),
    Case("float32", (90, 80), (7, 0), (64, 80), transposed=True),
    Case("float32", (90, 80), (7, 0), (64, 80), transposed=True, slab_bytes=4096),
    Case("bfloat16", (6, 90, 80), (1, 7, 0), (5, 64, 80), transposed=True, slab_bytes=2560),
    Case("float4_e2m1fn_x2", (90, 80), (7, 5), (64, 75), transposed=True, slab_bytes=1000),
    Case("bfloat16", (5, 9001), (0, 4000), (5, 5001), run_words=1024),
    Case("bfloat16", (300, 70), (0, 0), (300, 70), run_words=512),
]


def _random_cases(count: int) -> list[Case]:
    rng = random.Random(20)
    cases = []
    for _ in range(count):
        dims = rng.randint(1, 4)
        shape = tuple(rng.choice((1, 2, 3, 7, 16, 65, 200)) for _ in range(dims))
        if rng.random() < 0.3:
            shape = (*shape[:-1], rng.randint(4000, 9000))
        while prod(shape) > 60_000:
            shape = shape[1:]
        offset = tuple(rng.randrange(extent) for extent in shape)
        size = tuple(rng.randint(1, extent - at) for extent, at in zip(shape, offset, strict=True))
        transposed = len(shape) > 1 and rng.random() < 0.3
        run_words = rng.choice((512, 1024, 8192))
        cases.append(Case(rng.choice(list(BY_NAME)), shape, offset, size, transposed, 1 << 14, run_words))
    return cases


CASES = EDGES + _random_cases(50)


@pytest.fixture(scope="module")
def answers() -> dict[Case, list[int]]:
    """The sums that the interpreted kernel makes of all cases, from one process."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ROOT}
    made = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py")],
        input=json.dumps(CASES),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert made.returncode == 0, made.stderr[-4000:]
    return dict(zip(CASES, json.loads(made.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{list(case.size)}")
def test_interpreted_kernel_makes_the_sums_of_the_cpu(case: Case, answers: dict[Case, list[int]]) -> None:
    expected = fingerprint_tensor(tensor(case), case.shape, case.offset)
    assert tuple(answers[case]) == expected.sums


@pytest.mark.slow
def test_kernels_compile_to_machine_code_without_spills(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": ROOT, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(HERE / "compiled.py"), "80", "90"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert made.returncode == 0, made.stderr[-4000:]
    lines = made.stdout.splitlines()
    assert len(lines) == 2 * (8 + 2)
    assert [line for line in lines if not line.endswith("spills 0")] == []
