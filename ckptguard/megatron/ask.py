"""Asks Megatron Core, in a process of its own: ``python -m ckptguard.megatron.ask`` with JSON on both ends.

Asking changes a process for good (a fake process group, Megatron's global state, a stand-in for Transformer Engine), so
no caller is asked to host it. Nothing is kept on disk; a question takes about 4 s, most of it imports.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ckptguard.core.errors import DamagedError, EnvironmentFailedError, UnsupportedError
from ckptguard.core.problems import Problem
from ckptguard.megatron.refusals import refuse

TIMEOUT_SECONDS = 900.0
_SHOWN_LINES = 12


Question = tuple[Mapping[str, object], Mapping[str, object], str | None]
"""Training args as plain values (``Facts.args``), content metadata, transformer_impl instead of the one in the args."""


def ask(
    questions: Sequence[Question], *, sample_above: int | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[dict[str, Any]]:
    """The structure of every model-parallel rank of several layouts, in plain values.

    Args:
        questions: Answered by one process, or by two if only some of them want Transformer Engine.
        sample_above: As ``structure.structures_for`` has it.
        timeout_seconds: How long Megatron may take.

    Raises:
        UnsupportedError: The args do not lead to a model; says why.
        EnvironmentFailedError: The process ended without an answer, or ran too long.
    """
    for args, _, transformer_impl in questions:
        refuse({**args, "transformer_impl": transformer_impl or args.get("transformer_impl")} if args else {})
    answers: dict[int, dict[str, Any]] = {}
    # Megatron's local layers are other ones where it finds Transformer Engine, so that one process cannot do both.
    for te in (False, True):
        numbers = [n for n, (args, _, impl) in enumerate(questions) if _wants_te(args, impl) == te]
        if numbers:
            plain = [[dict(a), dict(meta), impl, sample_above] for a, meta, impl in (questions[n] for n in numbers)]
            answer = put({"kind": "args", "questions": plain}, timeout_seconds=timeout_seconds)
            answers |= zip(numbers, answer["answers"], strict=True)
    return [answers[n] for n in range(len(questions))]


def put(question: Mapping[str, object], *, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Puts a question to a new process that runs Megatron, and gives its answer in plain values.

    Raises:
        UnsupportedError: Megatron or Bridge cannot do what is asked; says why.
        EnvironmentFailedError: The process ended without an answer, or ran too long.
    """
    process = _STARTED.pop() if _STARTED and question["kind"] == "hf" else _start(_imports(question))
    return answer_of(process, question, doing="describe the model", timeout_seconds=timeout_seconds)


def answer_of(
    process: subprocess.Popen[str], question: Mapping[str, object], *, doing: str, timeout_seconds: float
) -> dict[str, Any]:
    """Puts a question to a process that waits for one, and ends the process.

    Args:
        process: Reads JSON from stdin and writes JSON to stdout.
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


_STARTED: list[subprocess.Popen[str]] = []


@contextmanager
def started_early() -> Iterator[None]:
    """Starts the process for a question about a snapshot now, so that it imports while the caller does other things."""
    process = _start("hf")
    _STARTED.append(process)
    try:
        yield
    finally:
        _STARTED.clear()
        process.kill()
        process.communicate()


def _start(kind: str) -> subprocess.Popen[str]:
    return start("ckptguard.megatron.ask", kind)


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    """A process for ``answer_of``: a module of ours that runs Megatron, without the caller's ranks and GPUs.

    Sets are stored in one order whenever it is asked, so that the same question gives the same bytes.
    """
    return subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=_environment() | {"PYTHONHASHSEED": "0"},
    )  # fmt: skip


def _environment() -> dict[str, str]:
    """The caller's, without its ranks and its GPUs: every answer is the same with and without them."""
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package_root, own.get("PYTHONPATH")]))
    return own | {
        "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip


def main() -> None:
    """Reads a question from stdin and writes the answer to stdout; all else that is printed goes to stderr."""
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()  # imports make many objects and no garbage
    with suppress(ImportError):  # said when the question is answered
        _IMPORTS[sys.argv[1]]()
    gc.freeze()
    gc.enable()
    question = json.load(sys.stdin)
    with answer_to:
        json.dump(_answer(question), answer_to)
    sys.stderr.flush()
    os._exit(0)  # taking all modules down would take a while


def import_for_snapshots() -> None:
    """Imports what questions about snapshots need, once; nothing of it depends on the question."""
    from ckptguard.megatron import te_skeleton

    if any(name.startswith("megatron.core") for name in sys.modules):
        return  # done already
    te_skeleton.install()
    _without_what_nothing_needs()
    from ckptguard.megatron import bridges, hf_worker  # noqa: F401

    bridges.enter()


def _import_for_args() -> None:
    """Imports what questions about training args need, once."""
    if any(name.startswith("megatron.core") for name in sys.modules):
        return  # done already
    _without_what_nothing_needs()
    from megatron.training import argument_utils, arguments  # noqa: F401

    from ckptguard.megatron import worker  # noqa: F401


def _import_for_te() -> None:
    from ckptguard.megatron import te_skeleton

    te_skeleton.install()
    _import_for_args()


_IMPORTS = {"hf": import_for_snapshots, "te": _import_for_te, "local": _import_for_args}


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    try:
        _IMPORTS[_imports(question)]()
        from ckptguard.megatron import hf_worker, worker
    except ImportError as error:
        return _refusal(f"Megatron Core cannot be imported here: {error}", "Install megatron-core 0.19 or newer.")
    try:
        if question["kind"] == "hf":
            return hf_worker.describe(question)
        return {"answers": [worker.describe(*one) for one in question["questions"]]}
    except UnsupportedError as error:
        return _refusal(error.message, error.next_step)
    except (
        AssertionError,
        AttributeError,
        ImportError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # whatever Megatron's own checks raise; there is no common base
        import traceback

        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, {frame.name}, line {frame.lineno}"
        return _refusal(
            f"Megatron Core refuses to build the model: {type(error).__name__}: {error} ({where})",
            "",
        )


def _imports(question: Mapping[str, Any]) -> str:
    """Which of ``_IMPORTS`` a question needs."""
    if question["kind"] == "hf":
        return "hf"
    args, _, transformer_impl, *_ = question["questions"][0]
    return "te" if _wants_te(args, transformer_impl) else "local"


def _wants_te(args: Mapping[str, Any], transformer_impl: str | None) -> bool:
    impl = transformer_impl or args.get("transformer_impl")
    return impl == "transformer_engine" or bool(args.get("hybrid_layer_pattern"))


def _without_what_nothing_needs() -> None:
    """Spares seconds of imports.

    Megatron and Bridge ask whether a tensor is a DTensor; none is. Nothing is computed here, so what Megatron compiles while
    it is imported is left as it is.
    """
    from ckptguard.megatron import te_skeleton

    te_skeleton.stand_in_for("torch.distributed.tensor", "torch.distributed._tensor")
    import torch

    def as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if function is not None else as_it_is

    compiler: Any = torch
    compiler.compile = as_it_is
    compiler.jit.script = as_it_is


def _refusal(message: str, next_step: str) -> dict[str, Any]:
    return {"unsupported": message, "next_step": next_step}


if __name__ == "__main__":
    main()
