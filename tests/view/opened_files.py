"""Which data files each rank of a real Megatron run opens, told by Python's own audit events."""

from __future__ import annotations

import os
from pathlib import Path

_HOOK = """
import os
import sys


def _tell(event, args, *, rank=os.environ.get("RANK"), folder=os.environ.get("CKPTGUARD_OPENED")):
    if event == "open" and rank is not None and str(args[0]).endswith(".distcp"):
        with open(f"{folder}/{rank}.txt", "a") as out:
            print(os.path.basename(args[0]), file=out)


sys.addaudithook(_tell)
"""


def watching(folder: Path) -> dict[str, str]:
    """Environment variables under which every process that is rank N of a run writes ``folder/N.txt``."""
    hooks = folder / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "sitecustomize.py").write_text(_HOOK)
    path = os.pathsep.join(filter(None, [str(hooks), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "CKPTGUARD_OPENED": str(folder)}


def opened(folder: Path) -> dict[int, set[str]]:
    """Names of the files by rank."""
    return {int(path.stem): set(path.read_text().split()) for path in folder.glob("*.txt")}
