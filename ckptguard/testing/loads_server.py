"""The helper process of ``megatron_loads``: imports Megatron once, then forks the ranks of each question.

``python -m ckptguard.testing.loads_server local|te``: one JSON question a line on stdin, one answer a line on stdout,
which maps the numbers of failed ranks to their errors. What a rank has to say it leaves in the question's folder.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_ANSWERS_FOR = {
    "logits": "loads_rank", "loads_strictly": "loads_rank",
    "bridge_loads": "loads_bridge", "bridge_imports": "loads_bridge", "bridge_saves": "loads_bridge",
}  # fmt: skip
_SHOWN_CHARACTERS = 8000


def _prepare(kind: str) -> None:
    """Stand-ins and the imports that every question needs."""
    from ckptguard.testing import cpu_stand_in

    cpu_stand_in.install()
    if kind == "te":
        from ckptguard.megatron import te_skeleton

        te_skeleton.install()
        _let_skeleton_load(te_skeleton)
    import torch

    torch.set_num_threads(1)  # forked ranks cannot use a pool of threads that was started here
    import megatron.training.argument_utils
    import megatron.training.checkpointing
    import megatron.training.initialize
    import megatron.training.models.dist_utils  # noqa: F401  # imported for the forks


def _let_skeleton_load(te: Any) -> None:
    """Two things of Transformer Engine 2.x that only loading meets, and that the skeleton has no need of.

    Its DotProductAttention forgives a missing ``core_attention._extra_state``, which Megatron stores of a learnable
    softmax only; its GroupedLinear sets up fp8 metadata before it looks at the stored states.
    """
    te.DotProductAttention.__init__ = _forgiving(te.DotProductAttention.__init__)
    te.GroupedLinear.init_fp8_metadata = lambda _self, num_gemms: None


def _forgiving(make: Any) -> Any:
    def forgive(_module: Any, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if "core_attention._extra_state" not in key]

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.register_load_state_dict_post_hook(forgive)

    return made


def _rank(question: dict[str, Any], rank: int, port: int) -> None:
    """Answer for one rank, in a process of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # so that processes which it starts and forgets end with it
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(question["world_size"]), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    file = Path(question["folder"]) / f"rank_{rank}"
    try:
        module = importlib.import_module(f"ckptguard.testing.{_ANSWERS_FOR[question['what']]}")
        answer = getattr(module, question["what"])(question, file)
        file.with_suffix(".json").write_text(json.dumps(answer, default=str))
    except BaseException as error:  # noqa: BLE001  # torch's CheckpointException is no Exception
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        file.with_suffix(".error").write_text(text[-_SHOWN_CHARACTERS:])
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # no teardown: process groups and threads end with the process


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait(ranks: list[BaseProcess], timeout_seconds: float) -> None:
    """Until all have ended; when one fails the others wait for it in vain, and are ended."""
    until = time.monotonic() + timeout_seconds
    while any(rank.is_alive() for rank in ranks):
        time.sleep(0.02)
        if time.monotonic() > until:
            break
        if any(rank.exitcode for rank in ranks):
            time.sleep(0.5)  # others may have an error of their own to tell
            break
    _end(ranks)


def _end(ranks: list[BaseProcess]) -> None:
    """Kill each rank with all that it started: Megatron's save leaves a persistent worker with a torch of its own."""
    for rank in ranks:
        if rank.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()
            rank.join()


def _answer(question: dict[str, Any]) -> dict[int, str]:
    """Fork the ranks, wait, and collect the errors of those that failed."""
    importlib.import_module(f"ckptguard.testing.{_ANSWERS_FOR[question['what']]}").prepare()
    fork, port = multiprocessing.get_context("fork"), _port()
    ranks: list[BaseProcess] = [
        fork.Process(target=_rank, args=(question, rank, port)) for rank in range(question["world_size"])
    ]

    def stop(*_: object) -> None:
        _end(ranks)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    for rank in ranks:
        rank.start()
    _wait(ranks, question["timeout_seconds"])
    out: dict[int, str] = {}
    for number, rank in enumerate(ranks):
        error = Path(question["folder"]) / f"rank_{number}.error"
        if error.exists():
            out[number] = error.read_text()
        elif rank.exitcode:
            out[number] = f"ended with code {rank.exitcode}"
    return out


def main() -> None:
    """Answer until stdin ends. What Megatron prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _prepare(sys.argv[1])
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
