"""A small model with what makes calls hard to follow, trained a few steps with its calls recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ckptguard.resume import module_calls, op_calls
from ckptguard.resume.records import Call, RankRecord

VOCABULARY, HIDDEN = 11, 8
Change = Callable[["Trained"], None]


class Gain(torch.autograd.Function):
    """Twice its input, with a gradient that can be made wrong by one bit."""

    wrong = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient * 2
        return flipped(gradient) if Gain.wrong else gradient


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the lowest bit of its first element changed."""
    copy = tensor.detach().clone()
    copy.view(torch.int32).view(-1)[0] ^= 1
    return copy


class Norm(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Gain.apply(super().forward(x)) if self.gains else super().forward(x)

    gains = False


class Model(torch.nn.Module):
    """Embedding, one residual block with dropout and a norm that counts its calls in a buffer, and tied weights."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.norm = Norm(HIDDEN)
        self.up = torch.nn.Linear(HIDDEN, 2 * HIDDEN)
        self.dropout = torch.nn.Dropout(0.2)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN)
        self.counter = Counter()
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.skip = torch.nn.Identity()

    def block(self, x: torch.Tensor) -> torch.Tensor:
        skip = Gain.apply(x) if self.gains else x
        return skip + self.down(self.dropout(torch.nn.functional.gelu(self.up(self.norm(x)))))

    gains = False

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        x = self.skip(self.embedding(tokens))
        x = checkpoint(self.block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else self.block(x)
        return {"logits": self.head(self.counter(x)) * scale}


class Counter(torch.nn.Module):
    """Hands its input on; its buffer counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


@dataclass
class Trained:
    """A run: what it computed and what was recorded of it."""

    model: Model
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    step: int | None = None
    micro_batch: int = 0
    rng: torch.Tensor | None = None

    def record(self) -> dict[int, RankRecord]:
        return {0: RankRecord(calls=self.calls, ended=True)}

    def modules(self, phase: str, step: int = 1) -> list[Call]:
        return [call for call in self.calls if call.step == step and call.phase == phase and not call.op]

    def ops(self, step: int = 1) -> list[Call]:
        return [call for call in self.calls if call.step == step and call.op]


def train(
    *,
    hooks: bool = True,
    ops: str | None = "",
    recompute: str = "",
    before: Change | None = None,
    at_step: Change | None = None,
    steps: int = 2,
    micro_batches: int = 2,
    limit: int = 1_000_000,
) -> Trained:
    """Trains the model from one seed.

    Args:
        hooks: Whether module calls are recorded.
        ops: Scope of operations that are recorded, None for all; empty for none.
        recompute: ``reentrant``, ``early`` (which stops by an exception), or nothing.
        before: Done when the model is there, before it is hooked.
        at_step: Done before every step.
        steps: How many.
        micro_batches: Of each step.
        limit: Of module calls.
    """
    torch.manual_seed(7)
    model = Model(recompute)
    run = Trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if before:
        before(run)
    if hooks:
        module_calls.install([model], run.calls.append, lambda: run.step, tell=run.told.append, limit=limit)
    data = torch.Generator().manual_seed(3)
    for step in range(1, steps + 1):
        run.step = step
        if at_step:
            at_step(run)
        with one_thread(), op_calls.recording(step, ops, run.calls.append) if ops != "" else contextlib.nullcontext():
            _step(run, micro_batches, data)
    run.step, run.rng = None, torch.get_rng_state()
    return run


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small are not shared among threads, which wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _step(run: Trained, micro_batches: int, data: torch.Generator) -> None:
    run.optimizer.zero_grad()
    for run.micro_batch in range(micro_batches):
        tokens = torch.randint(0, VOCABULARY, (4, 5), generator=data)
        logits = run.model(tokens, scale=0.5)["logits"]
        loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1))
        loss.backward()
        run.losses.append(loss.item())
    with module_calls.within("optimizer"):
        run.optimizer.step()
