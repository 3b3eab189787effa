"""The arms of one verification: each launched once, read, and kept with what it told."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptguard.resume.arm_lines import ArmLine
from ckptguard.resume.arms import run_arm
from ckptguard.resume.orders import Level, Order
from ckptguard.resume.records import RankRecord, read_arm
from ckptguard.resume.results import ArmRun

Records = dict[int, RankRecord]


class Listener:
    """Hears how the work goes, for progress bars; this one does nothing with it."""

    def begins(self, line: ArmLine) -> None:
        """An arm starts."""

    def step(self, step: int) -> None:
        """The running arm has finished a step."""

    def ended(self, run: ArmRun) -> None:
        """It is over."""

    def says(self, sentence: str) -> None:
        """A line of the chain of evidence."""


class ArmFailedError(Exception):
    """An arm did not do what it was launched for; carries its run."""

    def __init__(self, run: ArmRun) -> None:
        super().__init__(run.problem)
        self.run = run


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault for one arm and for its narrowing reruns: ``module:function``, its argument, and the arms concerned."""

    plugin: str
    argument: str | None
    arms: tuple[str, ...]


@dataclass(slots=True)
class Session:
    """Launches arms and remembers them.

    Attributes:
        level: How much the arms record.
        timeout_seconds: For each arm.
        placed: Whole tensors are recorded too, since the resumed run has another layout.
        plant: A fault to plant, for demonstrations and tests.
        listener: Hears of it.
        runs: Every launch so far.
        records: What the arms recorded, by name.
        chain: The evidence so far, in words.
    """

    level: Level
    timeout_seconds: float
    placed: bool = False
    plant: Plant | None = None
    listener: Listener = field(default_factory=Listener)
    runs: list[ArmRun] = field(default_factory=list)
    records: dict[str, Records] = field(default_factory=dict)
    chain: list[str] = field(default_factory=list)

    def run(self, line: ArmLine, **order: Any) -> Records:
        """Launches an arm, waits for it and reads what it recorded.

        Args:
            line: What to launch.
            order: Fields of its ``Order`` that are not the usual ones.

        Raises:
            ArmFailedError: It did not do what was asked of it.
        """
        folder = Path(line.folder)
        self.order(line, **order).write()
        self.listener.begins(line)
        run = run_arm(line, folder, timeout_seconds=self.timeout_seconds, on_progress=self.listener.step)
        self.runs.append(run)
        self.listener.ended(run)
        if run.problem is not None:
            raise ArmFailedError(run)
        self.records[line.name] = read_arm(folder)
        return self.records[line.name]

    def order(self, line: ArmLine, **changed: Any) -> Order:
        """What the processes of an arm are told."""
        order = Order(
            arm=line.name,
            folder=line.folder,
            level=self.level,
            stop_when_loaded=line.role == "load",
            placed=self.placed and line.role in ("save", "load", "resume"),
        )
        if self.plant is not None and line.role in self.plant.arms:
            order = dataclasses.replace(order, plugin=self.plant.plugin, plugin_argument=self.plant.argument)
        return dataclasses.replace(order, **changed)

    def say(self, sentence: str) -> None:
        """Adds a line to the chain of evidence."""
        self.chain.append(sentence)
        self.listener.says(sentence)
