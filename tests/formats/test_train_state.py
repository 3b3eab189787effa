"""Bridge's tracker is read without running anything of it."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

from ckptguard.core.errors import DamagedError, UnsafePickleError
from ckptguard.formats.train_state import tracked_step


def _saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize(
    "step", [torch.tensor(20), torch.tensor(20, dtype=torch.int32), torch.arange(30)[20], 20], ids=str
)
def test_the_step_is_read(step: object) -> None:
    assert tracked_step(_saved({"step": step, "consumed_train_samples": torch.tensor(640)}), where="t") == 20


@pytest.mark.parametrize(
    "value",
    [[], {}, {"step": "20"}, {"step": True}, {"step": torch.tensor(-1)}, {"step": torch.tensor(1.5)},
     {"step": torch.tensor([20])}],
    ids=str,
)  # fmt: skip
def test_what_names_no_step_is_told(value: object) -> None:
    with pytest.raises(DamagedError, match="t: holds no iteration"):
        tracked_step(_saved(value), where="t")


def test_a_tracker_that_is_cut_or_unsafe_is_refused() -> None:
    whole = _saved({"step": torch.tensor(20)})
    with pytest.raises(DamagedError, match="not a whole file"):
        tracked_step(whole[:-30], where="t")
    with pytest.raises(DamagedError):
        tracked_step(b"", where="t")
    with pytest.raises(UnsafePickleError):
        tracked_step(_saved({"step": _Evil()}), where="t")


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return pickle.loads, (b"",)
