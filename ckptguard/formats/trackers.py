"""Tracker files: what stands in a checkpoint's root and says which iteration is loaded.

Source: megatron/training/checkpointing.py ``read_metadata`` (megatron-core 0.19.2) reads ``latest_checkpointed_iteration.txt``,
an iteration or ``release``. megatron/bridge/training/checkpointing.py (0.6.2): ``save_checkpoint`` writes
``iter_N/train_state.pt``, a copy of it as ``latest_train_state.pt``, and Megatron-LM's tracker too;
``_resolve_checkpoint_iteration`` takes the step in ``latest_train_state.pt`` where that is there, and never a release from it,
else Megatron-LM's tracker. ``checkpoint_exists`` (utils/checkpoint_utils.py) is content with either.
"""

from __future__ import annotations

TEXT = "latest_checkpointed_iteration.txt"
TRAIN_STATE = "train_state.pt"
LATEST_TRAIN_STATE = f"latest_{TRAIN_STATE}"


def tracker_files(number: str, train_state: bytes | None) -> dict[str, bytes]:
    """The trackers by which Megatron-LM and Megatron-Bridge load one step, by name.

    Args:
        number: The iteration in decimal without leading zeros, or ``release``.
        train_state: Content of the step's ``train_state.pt``; None if it is not of Megatron-Bridge.
    """
    files = {TEXT: number.encode()}
    if train_state is not None and number != "release":
        files[LATEST_TRAIN_STATE] = train_state
    return files
