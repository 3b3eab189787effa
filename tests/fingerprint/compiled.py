"""Compiles the Triton kernels for GPUs that need not be there, and prints per kernel the stack and local bytes used.

Started by test_triton.py in a process without TRITON_INTERPRET. The arguments are compute capabilities, such as 90.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from ckptguard.fingerprint import triton_kernel as kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def _spilled(cubin: bytes) -> int:
    """Bytes of stack and local memory that the machine code uses per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        made = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", made.stdout))


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def _compile(kernel: Any, arch: int, types: dict[str, str], values: dict[str, int]) -> int:
    """Spilled bytes of a kernel whose arguments in ``values`` are constants, as an argument of 1 is for Triton."""
    signature = {name: "constexpr" if name in values else types[name] for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, values)
    return _spilled(triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["cubin"])


def main() -> None:
    """Compiles the narrowest and the widest tile for both words; with numbers as they come, and with all of them 1."""
    small = ("first_digit_words", "place_words", "runs", "places", "dims", "width", "count")
    types = {"table": "*i32", "meta": "*i64", "partials": "*i64", "out": "*i64", "lines": "i64", "line_words": "i64"}
    types |= dict.fromkeys(small, "i32")
    ones = dict.fromkeys((*small[:-1], "lines", "line_words"), 1)
    for arch in map(int, sys.argv[1:]):
        for word in ("*u8", "*u16"):
            for lines in (1, kernels.MAX_TILE_LINES):
                tile = {"tile_lines": lines, "tile_words": kernels.TILE // lines, "run_limit": kernels.RUN_WORDS}
                for values in (tile, tile | ones):
                    spilled = _compile(kernels.sum_tiles, arch, types | {"words": word}, values)
                    _say("sum_tiles", arch, word, *values.values(), "spills", spilled)
        for values in ({"block": kernels.REDUCE_BLOCK}, {"block": kernels.REDUCE_BLOCK, "count": 1}):
            _say(
                "reduce_partials",
                arch,
                *values.values(),
                "spills",
                _compile(kernels.reduce_partials, arch, types, values),
            )


if __name__ == "__main__":
    main()
