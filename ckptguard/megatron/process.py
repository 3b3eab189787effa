"""Processes that run Megatron for us: one question as JSON on stdin, one answer as JSON on stdout.

Running Megatron changes a process for good, so no caller is asked to host it. Both ends of the conversation stand here; what is
asked and answered is the business of the modules that use it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckptguard.core.errors import DamagedError, EnvironmentFailedError, UnsupportedError
from ckptguard.core.problems import Problem

TIMEOUT_SECONDS = 900.0
_SHOWN_LINES = 12
_EARLY: dict[tuple[str, ...], subprocess.Popen[str]] = {}


@contextmanager
def started_early(module: str, *arguments: str) -> Iterator[None]:
    """Starts a process that ``start`` will give out inside the block: it imports while the caller does other things."""
    process = start(module, *arguments)
    _EARLY[module, *arguments] = process
    try:
        yield
    finally:
        _EARLY.pop((module, *arguments), None)
        process.kill()
        process.communicate()


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """A process for ``answer_of``: a module of ours, without the caller's ranks and GPUs.

    Sets are stored in one order whenever it is asked, so that the same question gives the same bytes.
    """
    early = _EARLY.pop((module, *arguments), None)
    return early or subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=environment() | {"PYTHONHASHSEED": "0"},
    )  # fmt: skip


def environment() -> dict[str, str]:
    """The caller's, without its ranks and its GPUs: every answer is the same with and without them."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, own.get("PYTHONPATH")]))
    return own | {
        "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def answer_of(
    process: subprocess.Popen[str], question: Mapping[str, object], *, doing: str, timeout_seconds: float
) -> dict[str, Any]:
    """Puts a question to a process that waits for one, and ends the process.

    Args:
        process: From ``start``.
        question: Plain values.
        doing: What it is asked to do, for messages: it "did not describe the model".
        timeout_seconds: How long it may take.

    Raises:
        UnsupportedError: It answers that something is not supported.
        DamagedError: It answers that what it was given is damaged.
        EnvironmentFailedError: It ended without an answer, or ran too long.
    """
    try:
        answered, said = process.communicate(json.dumps(question, default=str), timeout=timeout_seconds)
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailedError(f"Megatron Core did not {doing} within {timeout_seconds:g} s") from error
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0 and not answered:
        tail = "\n".join(said.splitlines()[-_SHOWN_LINES:])
        raise EnvironmentFailedError(
            f"the process in which Megatron Core was to {doing} ended with code {process.returncode}:\n{tail}"
        )
    answer: dict[str, Any] = json.loads(answered)
    if "unsupported" in answer:
        raise UnsupportedError(answer["unsupported"], next_step=answer.get("next_step", ""))
    if "damaged" in answer:
        raise DamagedError(answer["damaged"], problems=[Problem("unreadable", answer["damaged"])])
    return answer


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], prepare: Callable[[], None]) -> None:
    """The other end: reads a question, writes the answer, and ends the process. All else that is printed goes to stderr.

    Args:
        answer: From question to answer.
        prepare: Imports what any answer needs, before the question comes; without it that is the answer.
    """
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    missing = None
    try:
        prepare()
    except ImportError as error:
        missing = no_megatron(error)
    question = json.load(sys.stdin)
    with answer_to:
        json.dump(missing or answer(question), answer_to)
    sys.stderr.flush()
    os._exit(0)  # taking all modules down would take a while


def no_megatron(error: ImportError) -> dict[str, Any]:
    """The answer of a process in which Megatron cannot be imported."""
    return {
        "unsupported": f"Megatron Core cannot be imported here: {error}",
        "next_step": "Install megatron-core 0.19 or newer.",
    }
