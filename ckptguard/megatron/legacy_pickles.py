"""What legacy ``--ckpt-format torch`` files hold beside the elements of their tensors: descriptions, and their pickles.

A file is described by values here, ``legacy_pickles_worker`` makes its pickle where torch may be imported, and the pickle
comes back with the storages that it names. Everything crosses between the processes as plain values (JSON).

Source: megatron/training/checkpointing.py ``generate_state_dict``, megatron/core/optimizer/distrib_optimizer.py
``get_parameter_state_dp_zero``, megatron/core/optimizer/optimizer.py ``ChainedOptimizer.save_parameter_state`` (0.19.2).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ckptguard.megatron import process
from ckptguard.megatron.process import TIMEOUT_SECONDS

OPTIMIZER_STATES = ("param", "exp_avg", "exp_avg_sq")
"""What ``distrib_optim.pt`` has of every buffer, in this order, when the optimizer is Adam."""


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A parameter or buffer of a rank.

    Attributes:
        name: In the rank's state_dict.
        dtype: torch's name.
        shape: Of the rank's own tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExtraState:
    """An ``_extra_state`` of a module that has nothing to remember.

    Attributes:
        name: In the rank's state_dict.
        empty_tensor: Whether it is an empty tensor of bytes, as Transformer Engine's modules have it since 2.0, or None, as
            Megatron's own have it.
    """

    name: str
    empty_tensor: bool


@dataclass(frozen=True, slots=True)
class ModelFile:
    """``model_optim_rng.pt`` of a rank.

    Attributes:
        path: Of the file.
        chunks: Of each model chunk (several with virtual pipeline stages), what its state_dict holds.
        optimizer: Whether the state of the optimizer that is the same on all ranks (parameter groups) is stored too.
    """

    path: str
    chunks: tuple[tuple[ModelTensor | ExtraState, ...], ...]
    optimizer: bool


@dataclass(frozen=True, slots=True)
class BufferState:
    """State of one gradient buffer: a 1-D float32 tensor per state.

    Attributes:
        dtypes: Of parameters and gradients: ``("bfloat16", "float32")``, torch's names.
        numel: Elements of each tensor.
    """

    dtypes: tuple[str, str]
    numel: int


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """``distrib_optim.pt`` of a rank.

    Attributes:
        path: Of the file.
        optimizers: Buffers of each of the rank's optimizers; None for one whose state another rank writes.
    """

    path: str
    optimizers: tuple[tuple[BufferState, ...] | None, ...]


RankFile = ModelFile | OptimizerFile


@dataclass(frozen=True, slots=True)
class Pickled:
    """A file's pickle.

    Attributes:
        data: The record ``data.pkl``, whose storages have the keys "0", "1", ...
        storages: By key: the storage's bytes, or the number of the tensor in the file's description whose elements it
            holds: ``ModelTensor`` by ``ModelTensor``, or state by state of buffer by buffer, counted from 0.
    """

    data: bytes
    storages: tuple[bytes | int, ...]


def rank_pickles(
    files: Iterable[RankFile],
    common: bytes,
    *,
    rng_states: Mapping[str, bytes] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> tuple[Pickled, ...]:
    """The pickles of all files, made in a process of its own.

    Args:
        files: What they hold.
        common: What all ranks store alike: ``common.pt``, or the object ``common_state/shard_0_1``, of the target, with the
            optimizer's ``param_groups`` where optimizer state is stored. Loaded as Megatron does, without running code.
        rng_states: By path of a ``model_optim_rng.pt``, the object ``rng_state/shard_*`` that it is to hold. Megatron ends
            when it loads a legacy file without one, unless it is told ``--no-load-rng``.
        timeout_seconds: How long the process may take.

    Raises:
        DamagedError: The common state cannot be read.
        UnsupportedError: It has no parameter groups of the optimizer, or Megatron Core cannot be imported.
        EnvironmentFailedError: The process ended without an answer, or ran too long.
    """
    question = {
        "files": to_plain(files),
        "common": base64.b64encode(common).decode(),
        "rng_states": {path: base64.b64encode(data).decode() for path, data in (rng_states or {}).items()},
    }
    return from_plain(_answer(question, timeout_seconds))


def _answer(question: Mapping[str, Any], timeout_seconds: float) -> list[dict[str, Any]]:
    waiting = process.start("ckptguard.megatron.legacy_pickles_worker")
    doing = "make the pickles of legacy files"
    files: list[dict[str, Any]] = process.answer_of(waiting, question, doing=doing, timeout_seconds=timeout_seconds)[
        "files"
    ]
    return files


def to_plain(files: Iterable[RankFile]) -> list[dict[str, Any]]:
    """Descriptions in the form that crosses between the processes."""
    return [{"kind": type(file).__name__, **asdict(file)} for file in files]


def from_plain(answers: Sequence[Mapping[str, Any]]) -> tuple[Pickled, ...]:
    """Values from what ``legacy_pickles_worker.rank_pickles`` gives."""
    return tuple(
        Pickled(
            base64.b64decode(answer["pickle"]),
            tuple(s if isinstance(s, int) else base64.b64decode(s) for s in answer["storages"]),
        )
        for answer in answers
    )
