"""A training loop without Megatron, as users have them: dropout, batch norm, AdamW, a scheduler; saves and loads all it holds.

    python plain_train.py --steps 4 --save DIR; python plain_train.py --steps 8 --load DIR

``--forget`` is a loop that does not save everything; ``--helpers`` starts processes that import torch beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckptguard

WORDS, LENGTH, BATCH = 64, 16, 8


class Model(torch.nn.Module):
    """Predicts words from words, position by position."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.norm, self.dropout = torch.nn.BatchNorm1d(LENGTH), torch.nn.Dropout(0.1)
        self.head = torch.nn.Linear(width, WORDS)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = hidden + self.scale * self.dropout(torch.nn.functional.gelu(layer(self.norm(hidden))))
        return self.head(hidden)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Words of a step and those that follow; no generator of the process is used."""
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"words": words[:, :-1], "labels": words[:, 1:]}


def save(path: Path, step: int, parts: dict[str, Any], forget: str | None) -> None:
    state = {name: part.state_dict() for name, part in parts.items()}
    state |= {"step": step, "torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = np.random.get_state()
    path.mkdir(parents=True, exist_ok=True)
    torch.save({name: value for name, value in state.items() if name != forget}, path / "state.pt")


def load(path: Path, parts: dict[str, Any]) -> int:
    state = torch.load(path / "state.pt", weights_only=False)
    for name, part in parts.items():
        if name in state:
            part.load_state_dict(state[name])
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    return state["step"]


def helpers() -> None:
    """Processes with the same environment: one by fork that leaves as Python does, one that is started anew."""
    if (child := os.fork()) == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    subprocess.run([sys.executable, "-c", "import torch, ckptguard"], check=True)


def options_of_the_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="number of the last step")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--horizon", type=int, default=100, help="steps of the learning rate's decay")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--forget", choices=("torch", "scheduler", "optimizer"))
    parser.add_argument("--final", type=Path, help="where parameters are written in the end, for tests")
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--helpers", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = options_of_the_line()
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = Model(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=options.horizon)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done = load(options.load, parts) if options.load else 0
    ckptguard.record_loaded(done, **parts, seen=done * BATCH)
    for step in range(done + 1, options.steps + 1):
        if options.helpers and step == 2:
            helpers()
        if step == options.fail_at:
            raise RuntimeError("the loop fails as it was told to")
        batch = batch_of(step)
        output = model(batch["words"])
        loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ckptguard.record(step, **parts, losses={"words": loss}, batch=batch, grad_norm=norm)
    if options.save:
        ckptguard.record_saved(options.steps, **parts, seen=options.steps * BATCH)
        save(options.save, options.steps, parts, options.forget)
    if options.final:
        torch.save(model.state_dict(), options.final)


if __name__ == "__main__":
    main()
