"""Plugin of the recording benchmark: switches a recorder between off, metrics and state from step to step, and times steps.

Steps of one process alternate, so what slows the machine slows all of them. Runs inside the training process.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from ckptguard.megatron.live_state import LiveState
from ckptguard.resume.orders import LEVELS

MODES = ("off", "metrics", "state")
_WARM_UP = 3  # steps that are not measured: memory grows, and the model's first passes are slow


class Switch:
    """Decides before every step; writes ``[[mode, seconds, own seconds, bytes], ...]`` when the stream ends."""

    def __init__(self, recorder: Any, target: Path) -> None:
        self.recorder, self.target = recorder, target
        self.mode, self.since, self.stored = "off", 0.0, 0
        self.own = 0.0  # CPU time spent in the recorder and in listing items, in this step
        self.waiting: list[str] = []
        self.steps: list[tuple[str, float, float, int]] = []
        self.made = 0
        self._random = random.Random(1)  # of its own: the training's generator stays as it is

    def install(self) -> None:
        """Stands between the hooks and the recorder; in a step that is off, items are not even listed."""
        for name in ("batch", "gradients", "step_ended", "step_begins"):
            setattr(self.recorder, name, self._unless_off(getattr(self.recorder, name)))
        begins, ended = self.recorder.step_begins, self.recorder.ended

        def step_begins(step: int, items: Any) -> None:
            self.next_step()
            begins(step, items)

        def end() -> None:
            self.target.write_text(json.dumps(self.steps))
            ended()

        self.recorder.step_begins, self.recorder.ended = step_begins, end
        for name in ("items", "gradients"):
            self._list_unless_off(name)

    def next_step(self) -> None:
        """Books the step that is over, its recording included, and chooses the next one's mode."""
        now = time.perf_counter()
        file = self.recorder._writer._file
        if self.made > _WARM_UP:
            self.steps.append((self.mode, now - self.since, self.own, file.tell() - self.stored))
        if not self.waiting:
            self.waiting = self._random.sample(MODES, len(MODES))
        self.mode, self.stored, self.made = self.waiting.pop(), file.tell(), self.made + 1
        self.recorder._level = LEVELS.index("state" if self.mode == "off" else self.mode)
        self.since, self.own = time.perf_counter(), 0.0

    def _unless_off(self, method: Any, otherwise: Any = None) -> Any:
        def call(*args: Any) -> Any:
            if self.mode == "off" and self.made:
                return otherwise
            start = time.thread_time()
            result = method(*args)
            self.own += time.thread_time() - start
            return result

        return call

    def _list_unless_off(self, name: str) -> None:
        setattr(LiveState, name, self._unless_off(getattr(LiveState, name), ()))


def install(recorder: Any, target: str) -> None:
    """As an order's ``plugin``; ``target`` is the file for the steps."""
    Switch(recorder, Path(target)).install()
