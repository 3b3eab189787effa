"""Runs the Triton kernel in Triton's interpreter, on CPU tensors. Started by test_triton.py with TRITON_INTERPRET=1.

The variable must be set before triton is imported anywhere in the process, so this is a process of its own. It reads
cases from standard input as JSON and prints the sums of each as JSON.
"""

from __future__ import annotations

import json
import sys

import triton_cases

from ckptguard.core.boxes import Box
from ckptguard.core.dtypes import BY_NAME
from ckptguard.fingerprint import live, triton_kernel


def main() -> None:
    """Answers every case with the two sums that the kernel makes."""
    answers = []
    for case in (triton_cases.Case(*fields) for fields in json.load(sys.stdin)):
        live.SLAB_BYTES = case.slab_bytes
        triton_kernel.RUN_WORDS = case.run_words
        tensor = triton_cases.tensor(case)
        box = Box(tuple(case.offset), tuple(tensor.shape))
        answers.append(live._on_gpu(tensor, BY_NAME[case.dtype], tuple(case.shape), box).tolist())
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
