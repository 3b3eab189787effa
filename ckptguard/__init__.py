"""ckptguard: checkpoint integrity and resharding for Megatron.

The rooms, from the top: ``cli`` parses and prints, ``engine`` runs plans over files, ``formats`` reads what is on disk,
``fingerprint`` digests it, ``megatron`` asks Megatron Core about structure, ``resume`` proves that a resumed run is the same
run, ``report`` makes tables and JSON, and ``core`` holds the values that all of them pass around. Imports point downwards only
(``pyproject.toml``).

A training loop that is not Megatron's calls ``record_loaded``, ``record`` and ``record_saved``, so that ``ckptguard
verify-resume`` can compare its runs. In any other run they return at once, and torch is not imported here.
"""

import os as _os
from typing import Any as _Any

__version__ = "0.1.0"

_recorded = bool(_os.environ.get("CKPTGUARD_RECORD"))


def record_loaded(
    step: int, *, model: _Any, optimizer: _Any = None, scheduler: _Any = None, scaler: _Any = None, **values: _Any
) -> None:
    """Tells that state is ready: built anew or loaded, and no step was made yet. Call it once, before the loop.

    In the arm that only loads, the process ends here with exit code 0.

    Args:
        step: Steps that are behind this state: 0 in a fresh run.
        model: The module; or several, in a list or by name.
        optimizer: Likewise; of torch's form (``state`` by parameter, ``param_groups``).
        scheduler: Likewise; anything with ``state_dict``.
        scaler: Likewise; such as ``torch.amp.GradScaler``.
        values: Whatever else decides what comes next and has to be the same after a resume: the place in the data,
            counters, a ``torch.Generator``. Python's, numpy's and torch's generators are always recorded.
    """
    if _recorded:
        from ckptguard.resume.plain_loop import tell

        tell("loaded", step, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}, values)


def record(
    step: int,
    *,
    model: _Any,
    optimizer: _Any = None,
    scheduler: _Any = None,
    losses: _Any = None,
    batch: _Any = None,
    scaler: _Any = None,
    **values: _Any,
) -> None:
    """Tells that a step is over: optimizer and scheduler have made theirs.

    Gradients are recorded as the optimizer saw them, if ``record_loaded`` was called, else as they are now.

    Args:
        step: Its number, counted from 1.
        model: As for ``record_loaded``, and so are ``optimizer``, ``scheduler`` and ``scaler``.
        optimizer: See ``model``.
        scheduler: See ``model``.
        losses: The loss; or several, in a list or by name.
        batch: What was trained on: tensors in dicts, lists and tuples.
        scaler: See ``model``.
        values: Whatever else the step gave, such as ``grad_norm``.
    """
    if _recorded:
        from ckptguard.resume.plain_loop import tell

        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        tell("step", step, losses, batch, parts, values)


def record_saved(
    step: int, *, model: _Any, optimizer: _Any = None, scheduler: _Any = None, scaler: _Any = None, **values: _Any
) -> None:
    """Tells that the state after ``step`` is about to be saved; arguments as for ``record_loaded``."""
    if _recorded:
        from ckptguard.resume.plain_loop import tell

        tell("saved", step, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}, values)
