"""Run by test_reshard_args: what Megatron-LM would store of command lines, as ``parse_args`` and ``validate_args`` leave it.

``python parsed_args_worker.py < QUESTIONS > ANSWERS``: a JSON list of ``[world size, flags]``; of each the args as plain
values, or the text of the error.
"""

# ruff: noqa: E402 - the stand-in is there before Megatron is imported

from __future__ import annotations

import json
import os
import sys

to = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0"}

from ckptguard.testing import cpu_stand_in

cpu_stand_in.install()

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.arguments import parse_args, validate_args

from ckptguard.formats.pickles import as_plain


def _parsed(world: int, flags: list[str]) -> object:
    os.environ["WORLD_SIZE"] = str(world)
    sys.argv = ["train", *flags]
    try:
        args = parse_args()
        validate_args(args, {"tokenizer_type": "NullTokenizer"})
        build_tokenizer(args)
    except (AssertionError, ValueError) as error:
        return f"refused: {error}"
    return as_plain(vars(args))


with to:
    json.dump([_parsed(world, flags) for world, flags in json.load(sys.stdin)], to, default=str)
to.close()
os._exit(0)
