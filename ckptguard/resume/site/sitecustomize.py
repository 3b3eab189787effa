"""Imported by Python at start-up when this folder is on ``PYTHONPATH``: records training in the processes of an arm.

Waits for torch to be imported, so that helper processes that never import it start as fast as ever, and leaves the place to the
next ``sitecustomize`` on the path. A training run must never fail for what stands here.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


def _record() -> None:
    if importlib.util.find_spec("ckptguard") is None:  # this interpreter has it not installed
        sys.path.append(str(Path(__file__).resolve().parents[3]))
    from ckptguard.core.after_import import after_import

    after_import("torch", _torch_is_there)


def _torch_is_there(_: object) -> None:
    try:
        from ckptguard.resume import injected

        injected.watch()
    except Exception as error:  # noqa: BLE001 - the arm is told to be failed by the stream that is missing
        print(f"ckptguard: recording failed: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


def _run_next() -> None:
    """Runs what Python would have run without this folder."""
    here = Path(__file__).resolve().parent
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("CKPTGUARD_RECORD"):
    _record()
_run_next()
