"""Asks Megatron Core, in a process of its own: ``python -m ckptguard.megatron.ask`` with JSON on both ends.

Asking changes a process for good (a fake process group, Megatron's global state, a stand-in for Transformer Engine), so
no caller is asked to host it. Nothing is kept on disk; a question takes about 4 s, most of it imports.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ckptguard.core.errors import UnsupportedError
from ckptguard.megatron import process
from ckptguard.megatron.process import TIMEOUT_SECONDS
from ckptguard.megatron.refusals import refuse

_MODULE = "ckptguard.megatron.ask"


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
    waiting = process.start(_MODULE, _imports(question))
    return process.answer_of(waiting, question, doing="describe the model", timeout_seconds=timeout_seconds)


def started_early() -> AbstractContextManager[None]:
    """Starts the process for a question about a snapshot now, so that it imports while the caller does other things."""
    return process.started_early(_MODULE, "hf")


def main() -> None:
    """Answers one question."""
    process.serve(_answer, _prepare)


def _prepare() -> None:
    gc.disable()  # imports make many objects and no garbage
    try:
        _IMPORTS[sys.argv[1]]()
    finally:
        gc.freeze()
        gc.enable()


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
        return process.no_megatron(error)
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
