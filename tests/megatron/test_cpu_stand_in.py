"""The CPU stand-in, and Mamba's kernels in plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptguard.testing import hybrid_cpu
from ckptguard.testing.cpu_stand_in import FusedAdam, site_directory

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU the stand-in does nothing")
def test_an_unmodified_script_runs_with_the_site_directory() -> None:
    """No line of the script knows about the stand-in; CUDA calls work, and asking twice for it changes nothing."""
    script = """
import torch
from ckptguard.testing import cpu_stand_in
cpu_stand_in.install()
a = torch.zeros(2, device="cuda").cuda()
assert a.device.type == "cpu" and a.type() == "torch.cuda.FloatTensor", (a.device, a.type())
assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site_directory()), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_fused_adam_takes_the_steps_of_adamw() -> None:
    """The same numbers as torch's AdamW, with the step in the param group where Megatron looks for it."""
    torch.manual_seed(0)
    start = torch.randn(5, 3)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mine = FusedAdam([ours], lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    for _ in range(4):
        ours.grad = torch.randn(5, 3)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)
    assert mine.param_groups[0]["step"] == 4


def test_scan_equals_its_closed_form() -> None:
    """y_t is the sum over s <= t of (C_t . B_s) exp(sum of dt A between them) dt_s x_s, plus D x_t."""
    torch.manual_seed(0)
    x, dt = torch.randn(2, 6, 4, 3), torch.randn(2, 6, 4)
    decay, skip, bias = -torch.rand(4), torch.randn(4), torch.randn(4)
    into, out = torch.randn(2, 6, 2, 5), torch.randn(2, 6, 2, 5)
    y = hybrid_cpu.mamba_chunk_scan_combined(x, dt, decay, into, out, 256, D=skip, dt_bias=bias, dt_softplus=True)

    step = torch.nn.functional.softplus(dt + bias)
    total = torch.cumsum(step * decay, dim=1)
    weight = torch.exp(total[:, :, None] - total[:, None, :])
    causal = torch.ones(6, 6).tril()[None, :, :, None]
    match = torch.einsum("btgn,bsgn->btsg", out, into).repeat_interleave(2, dim=-1)
    expected = torch.einsum("btsh,bshp->bthp", match * weight * causal, step[..., None] * x) + skip[:, None] * x
    torch.testing.assert_close(y, expected)
