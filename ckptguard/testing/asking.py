"""One warm process that answers what the product asks Megatron, for tests that ask often.

``ckptguard.megatron.ask`` and ``restate`` start a process for every question, and most of its seconds are imports. This one
imports the same once, and a fork of it answers each question, so that no answer sees what another left behind.

    with Asking() as asking: monkeypatch.setattr(ask, "put", asking.put)
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn, Self

from ckptguard.core.errors import EnvironmentFailedError, UnsupportedError
from ckptguard.megatron import ask, process, restate_worker, safe_loading


class Asking:
    """The warm process; use it in a ``with`` statement. Thread-safe: one question at a time."""

    def __init__(self, kind: str = "hf") -> None:
        """Starts it.

        Args:
            kind: What it imports, as ``ask._IMPORTS`` has it: "hf" answers for models with Transformer Engine, "local" for
                Megatron's own layers, and about common state.
        """
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptguard.testing.asking", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env=process.environment(), start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def put(self, question: Mapping[str, object], *, timeout_seconds: float = 0.0) -> dict[str, Any]:
        """As ``ask.put``; a question never takes long here.

        Raises:
            UnsupportedError: As there.
            EnvironmentFailedError: There was no answer.
        """
        assert self._process.stdin
        assert self._process.stdout
        with self._lock:
            self._process.stdin.write(json.dumps(question, default=str) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line.strip():
            raise EnvironmentFailedError("the warm process that asks Megatron Core gave no answer")
        answer: dict[str, Any] = json.loads(line)
        if "unsupported" in answer:
            raise UnsupportedError(answer["unsupported"], next_step=answer["next_step"])
        return answer


def main() -> None:
    """Answers questions about snapshots, one a line, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ask._IMPORTS[sys.argv[1]]()
    if sys.argv[1] == "local":
        safe_loading.register()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _answer(json.loads(line), answers.fileno())
        os.waitpid(child, 0)
        answers.write("\n")  # ends the child's answer, or stands for one that did not come
        answers.flush()


def _answer(question: dict[str, Any], to: int) -> NoReturn:
    """In the fork: writes the answer without a line's end, and ends the fork."""
    try:
        answer = restate_worker._answer(question) if question["kind"] == "restate" else ask._answer(question)
        left = memoryview(json.dumps(answer).encode())
        while left:
            left = left[os.write(to, left) :]
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
