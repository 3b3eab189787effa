"""Run by test_restate: answers many questions in one process, and reads each answer as Megatron reads a checkpoint.

``python restate_reader.py DIR``: for every DIR/NAME.json, a question, leaves DIR/NAME.out.pt: what Megatron reads, and the
answer without its bytes, or what was refused.
"""

from __future__ import annotations

import io
import json
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

from ckptguard.megatron import restate_common, restate_groups, restate_worker, safe_loading

safe_loading.register()

import torch  # noqa: E402 - what Megatron allows is registered first
from megatron.core.dist_checkpointing.serialization import load_common_state_dict  # noqa: E402


def outcome(question: dict[str, Any], place: Path) -> dict[str, Any]:
    """What the answer holds for Megatron, with args as a dictionary."""
    try:
        answer = restate_worker.answered(question)
    except (restate_groups.BadGroupsError, safe_loading.UnreadableError) as error:
        return {"damaged": str(error)}
    except restate_common.TooOldError as error:
        return {"unsupported": str(error)}
    place.mkdir()
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (place / "common.pt").write_bytes(b64decode(answer.pop("common_file")))
    common = load_common_state_dict(place)
    (again,) = read(answer.pop("common_state"))
    assert repr(again) == repr(common)
    objects = {name: read(data) for name, data in answer.pop("objects").items()}
    args = {name: str(value) for name, value in vars(common.pop("args")).items()} if "args" in common else None
    common.pop("rerun_state_machine", None)  # holds Megatron's enums
    return answer | {"common": common, "args": args, "objects": objects}


def read(data: str) -> Any:
    """An object, as Megatron's strategy loads it."""
    return torch.load(io.BytesIO(b64decode(data)), weights_only=True)


def main() -> None:
    place = Path(sys.argv[1])
    for path in sorted(place.glob("*.json")):
        out = outcome(json.loads(path.read_text()), place / path.stem)
        torch.save(out, path.with_suffix(".out.pt"))


if __name__ == "__main__":
    main()
