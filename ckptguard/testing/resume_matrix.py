"""Runs of a recipe with faults in the resumed arm, and what is found of each: one reference and one save for all of them.

Arms are launched and compared as ``verify-resume`` does it. A row costs one launch: a resumed arm records what it loaded before it
goes on.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ckptguard.resume
from ckptguard.core.errors import UsageError
from ckptguard.resume.arm_lines import ArmLine, Request, Role, plan_rerun
from ckptguard.resume.arms import run_arm
from ckptguard.resume.call_compare import Located, first_fault
from ckptguard.resume.compare import compare_loaded, compare_steps
from ckptguard.resume.excuses import RULES
from ckptguard.resume.launch_line import parse
from ckptguard.resume.orders import Order
from ckptguard.resume.records import RankRecord, read_arm
from ckptguard.resume.results import Comparison, Difference
from ckptguard.resume.settings import contradictions
from ckptguard.testing.recipes import TRAINER, Recipe, resave
from ckptguard.testing.resume_faults import FAULT_RECIPES, PREPARED, Fault, file_edits
from ckptguard.testing.resume_peers import first_other_hash, first_other_loss, read_hashes

Records = dict[int, RankRecord]
SAVE_AT, STEPS = 2, 4
_ROOT = Path(__file__).resolve().parents[2]
_SITE = Path(ckptguard.resume.__file__).parent / "site"
_PLANT = "ckptguard.testing.resume_faults:plant"
_OF_EVERY_RESUME = frozenset({"counts of the process in the rerun state machine"})  # rules that a clean resume needs too
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "NCCL_ALGO": "Ring"}


class ArmFailedError(Exception):
    """An arm of a trial did not do what it was launched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found of a fault.

    Attributes:
        name: Of the fault.
        answer: As ``Expected.answer``.
        first: The first difference.
        excused: Names of rules that explain differences, but those that every resume needs.
        located: The module and the operation to blame, for compute faults.
        loss: Where a comparison of losses would have seen it first; None for nowhere.
        hashes: The same of ``torch.hash_tensor``.
        values: How many values were compared.
        seconds: Of the launch.
        problem: Why it is not as expected; empty if it is.
    """

    name: str
    answer: str
    first: Difference | None = None
    excused: tuple[str, ...] = ()
    located: Located | None = None
    loss: str | None = None
    hashes: str | None = None
    values: int = 0
    seconds: float = 0.0
    problem: str = ""


class Bench:
    """A recipe's reference and save, and resumes from it.

    Args:
        folder: For its arms; made.
        recipe: What is trained.
        plants: What every arm is planted with.
        operations: Whether calls of operations are recorded, for compute faults.
        timeout_seconds: For each arm.
    """

    def __init__(
        self, folder: Path, recipe: Recipe, *, plants: str = "", operations: bool = False, timeout_seconds: float = 240
    ) -> None:
        self.folder, self.recipe, self.plants, self.operations = folder, recipe, plants, operations
        self.timeout_seconds = timeout_seconds
        self.seconds = 0.0

    @cached_property
    def reference(self) -> Records:
        """The uninterrupted run."""
        return self.run(self._line("reference", "reference"), operations=self.operations)

    @cached_property
    def save(self) -> Records:
        """The run up to its save."""
        return self.run(self._line("save", "save"))

    def row(self, fault: Fault) -> Row:
        """Resumes with a fault and tells what is found."""
        if fault.where == "GPU":
            return Row(name=fault.name, answer="not run")
        request = self._request(fault)
        if _refused(request):
            return judged(fault, Row(name=fault.name, answer="refused"))
        reference, save = self.reference, self.save
        line = self._line("resume", fault.name, request)
        if fault.where == "files":
            line = self._with_other_files(line, fault)
        since = time.monotonic()
        try:
            records = self.run(line, plants=fault.name if fault.where == "process" else "", operations=fault.sort == "compute")
        except ArmFailedError as error:
            return Row(name=fault.name, answer="failed", problem=str(error))
        seconds = time.monotonic() - since
        steps, loaded = self.compare(records)
        first = loaded.first or steps.first
        excused = tuple(dict.fromkeys(e.rule for e in (*loaded.excused, *steps.excused) if e.rule not in _OF_EVERY_RESUME))
        answer = first.kind if first else "explained" if excused else "silent"
        hashes = [read_hashes(self.folder / name) for name in ("reference", "save", Path(line.folder).name)]
        row = Row(
            name=fault.name,
            answer=answer,
            first=first,
            excused=excused,
            located=first_fault(reference, records) if fault.sort == "compute" else None,
            loss=first_other_loss(reference, records),
            hashes=first_other_hash(*hashes),
            values=steps.values + loaded.values,
            seconds=seconds,
        )
        return judged(fault, row)

    def compare(self, records: Records) -> tuple[Comparison, Comparison]:
        """Of a resumed arm: its steps against the reference, and what it loaded against what was saved."""
        steps = compare_steps(
            "reference", self.reference, "resume", records, (SAVE_AT + 1, STEPS), "does it go on as the reference?", RULES
        )
        loaded = compare_loaded("save", self.save, "resume", records, SAVE_AT, "is what was saved loaded?", RULES, steps)
        return steps, loaded

    def run(self, line: ArmLine, *, plants: str = "", operations: bool = False) -> Records:
        """Launches an arm and reads what it recorded.

        Raises:
            ArmFailedError: It failed, or its recorder did.
        """
        planted = "+".join(filter(None, ("hash_tensor", self.plants, plants)))
        order = Order(arm=line.name, folder=line.folder, plugin=_PLANT, plugin_argument=planted)
        if operations:
            order = dataclasses.replace(order, level="op", calls=(SAVE_AT + 1, SAVE_AT + 1))
        order.write()
        run = run_arm(line, Path(line.folder), timeout_seconds=self.timeout_seconds)
        self.seconds += run.seconds
        if run.problem is not None:
            raise ArmFailedError(f"{line.name}: {run.problem}\n" + "\n".join(run.last_lines))
        records = read_arm(Path(line.folder))
        for rank, record in records.items():
            if failed := [words for words in record.unobserved if words.startswith("recorder failed")]:
                raise ArmFailedError(f"{line.name}, rank {rank}: {'; '.join(failed)}")
        return records

    def resumed(self, name: str) -> Records:
        """A resume with nothing planted."""
        return self.run(self._line("resume", name))

    def _request(self, fault: Fault | None = None) -> Request:
        launched, world = [sys.executable], self.recipe.world_size
        added = dict(_ENVIRONMENT)
        if world > 1:
            launched += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        else:  # a launcher takes seconds, and has nothing to do
            added |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            added |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        return Request(
            line=parse([*launched, "-m", TRAINER, *self.recipe.megatron_flags()]),
            framework="megatron-lm",
            steps=STEPS,
            save_at=(SAVE_AT - 1, SAVE_AT),
            folder=str(self.folder),
            site=str(_SITE),
            environment=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(_ROOT)},
            added_environment=added,
            resume_args=fault.flags if fault else (),
            resume_environment=dict(fault.variables) if fault else {},
        )

    def _line(self, role: Role, name: str, request: Request | None = None) -> ArmLine:
        return plan_rerun(request or self._request(), role, name=name, purpose="a trial", end=STEPS)

    def _with_other_files(self, line: ArmLine, fault: Fault) -> ArmLine:
        """The arm with a changed copy of the checkpoint."""
        assert line.checkpoints is not None
        old, copy = line.checkpoints, self.folder / f"{fault.name}-files"
        if fault.name == "saved-again":
            resave(Path(old), self.recipe, copy)
        else:
            shutil.copytree(old, copy)
            file_edits()[fault.name](copy)
        command = tuple(word.replace(old, str(copy)) for word in line.command)
        return dataclasses.replace(line, command=command, checkpoints=str(copy))


def bench_for(fault: Fault, faults: Sequence[Fault], folder: Path) -> Bench:
    """The bench on which a fault is tried, with all that others of the same recipe need too."""
    alike = [other for other in faults if other.recipe == fault.recipe]
    return Bench(
        folder / fault.recipe,
        FAULT_RECIPES[fault.recipe],
        plants=PREPARED if fault.recipe == "dense" else "",
        operations=any(other.sort == "compute" for other in alike),
    )


def judged(fault: Fault, row: Row) -> Row:
    """The row with what is not as expected, if anything."""
    expected, wrong = fault.expected, []
    if row.answer != expected.answer:
        wrong.append(f"the answer is {row.answer}, not {expected.answer}")
    if row.first is not None and not wrong:
        wrong += _unlike_first(fault, row.first)
    if expected.answer == "explained" and not row.excused:
        wrong.append("no rule explains it")
    if expected.module or expected.operation:
        wrong += _unlike_located(fault, row.located)
    return dataclasses.replace(row, problem="; ".join(wrong))


def _unlike_first(fault: Fault, first: Difference) -> list[str]:
    expected = fault.expected
    step = expected.step or (SAVE_AT if expected.answer == "loaded" else SAVE_AT + 1)
    checks: list[tuple[Any, bool]] = [
        (f"group {first.group}", first.group == expected.group),
        (f"item {first.item}", re.search(expected.item, first.item) is not None),
        (f"rank {first.rank}", expected.rank in (None, first.rank)),
        (f"step {first.step}", first.step == step),
    ]
    return [f"its first difference has {what}" for what, right in checks if not right]


def _unlike_located(fault: Fault, located: Located | None) -> list[str]:
    if located is None:
        return ["no call is to blame"]
    expected = fault.expected
    wrong = [f"module {located.module} is blamed"] * (not re.search(expected.module, located.module))
    return wrong + [f"operation {located.op or 'none'} is blamed"] * (not re.search(expected.operation, located.op))


def _refused(request: Request) -> bool:
    """Whether the resumed run is told to compute something else, so that nothing is started."""
    try:
        contradictions(
            request.framework,
            request.line.arguments,
            request.environment,
            request.resume_args,
            request.resume_environment,
        )
    except UsageError:
        return True
    return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
