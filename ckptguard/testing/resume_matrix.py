"""Runs of a recipe with faults in the resumed arm, and what is found of each: one reference and one save for all of them.

Arms are launched and compared as ``verify-resume`` does it. A row costs one launch: a resumed arm records what it loaded before
it goes on.
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

from ckptguard.core.errors import UsageError
from ckptguard.megatron.launch_line import parse
from ckptguard.resume.arm_lines import ArmLine, Request, Role, plan_rerun
from ckptguard.resume.call_compare import Located, first_fault
from ckptguard.resume.compare import compare_loaded, compare_steps
from ckptguard.resume.excuses import RULES
from ckptguard.resume.injected import site_directory
from ckptguard.resume.narrowing import locate
from ckptguard.resume.records import Call, in_scope
from ckptguard.resume.results import Comparison
from ckptguard.resume.session import ArmFailedError, Records, Session
from ckptguard.resume.settings import contradictions
from ckptguard.testing.recipes import TRAINER, Recipe, launch_command, resave
from ckptguard.testing.resume_faults import FAULT_RECIPES, PREPARED, Fault, file_edits
from ckptguard.testing.resume_peers import first_other_hash, first_other_loss, read_hashes

SAVE_AT, STEPS = 2, 4
_ROOT = Path(__file__).resolve().parents[2]
_PLANT = "ckptguard.testing.resume_faults:plant"
_OF_EVERY_RESUME = frozenset(
    {"counts of the process in the rerun state machine"}
)  # rules that a clean resume needs too
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "NCCL_ALGO": "Ring"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was found of a fault; plain values.

    Attributes:
        name: Of the fault.
        answer: As ``Expected.answer``, or ``failed``.
        step: Of the first difference; None and empty where there is none.
        rank: Of it.
        group: Of its item.
        item: Its name.
        module: The module to blame, of compute faults; empty if none is.
        operation: The operation to blame.
        excused: Names of rules that explain differences, but those that every resume needs.
        loss: Where a comparison of losses would have seen it first; None for nowhere.
        hashes: The same of ``torch.hash_tensor``.
        values: How many values were compared.
        seconds: Of the launch.
        problem: Why it is not as expected; empty if it is.
    """

    name: str
    answer: str
    step: int | None = None
    rank: int | None = None
    group: str = ""
    item: str = ""
    module: str = ""
    operation: str = ""
    excused: tuple[str, ...] = ()
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
        self, folder: Path, recipe: Recipe, *, plants: str = "", operations: bool = False, timeout_seconds: float = 600
    ) -> None:
        self.folder, self.recipe, self.plants, self.operations = folder, recipe, plants, operations
        self.session = Session("state", timeout_seconds)

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
        request = request_for(self.recipe, self.folder, flags=fault.flags, variables=fault.variables)
        if _refused(request):
            return judged(fault, Row(name=fault.name, answer="refused"))
        _ = self.reference, self.save  # a resume needs what the save arm saved
        line = self._line("resume", fault.name, request)
        if fault.where == "files":
            line = self._with_other_files(line, fault)
        since = time.monotonic()
        try:
            records = self.run(
                line, plants=fault.name if fault.where == "process" else "", operations=fault.sort == "compute"
            )
        except ArmFailedError as error:
            problem = "\n".join((f"{error.run.name}: {error.run.problem}", *error.run.last_lines))
            return Row(name=fault.name, answer="failed", problem=problem)
        return judged(fault, self._found(fault, records, Path(line.folder), time.monotonic() - since))

    def _found(self, fault: Fault, records: Records, folder: Path, seconds: float) -> Row:
        steps, loaded = self.compare(records)
        first = loaded.first or steps.first
        rules = dict.fromkeys(e.rule for e in (*loaded.excused, *steps.excused))
        excused = tuple(rule for rule in rules if rule not in _OF_EVERY_RESUME)
        located = narrowed(self.reference, records, steps) if fault.sort == "compute" else None
        hashes = [read_hashes(path) for path in (self.folder / "reference", self.folder / "save", folder)]
        row = Row(
            name=fault.name,
            answer="explained" if excused else "silent",
            module=located.module if located else "",
            operation=located.op if located else "",
            excused=excused,
            loss=first_other_loss(self.reference, records),
            hashes=first_other_hash(*hashes),
            values=steps.values + loaded.values,
            seconds=seconds,
        )
        if first is None:
            return row
        found = {"answer": first.kind, "step": first.step, "rank": first.rank, "group": first.group, "item": first.item}
        return dataclasses.replace(row, **found)  # type: ignore[arg-type]

    def compare(self, records: Records) -> tuple[Comparison, Comparison]:
        """Of a resumed arm: its steps against the reference, and what it loaded against what was saved."""
        steps = compare_steps(
            "reference",
            self.reference,
            "resume",
            records,
            (SAVE_AT + 1, STEPS),
            "does it go on as the reference?",
            RULES,
        )
        loaded = compare_loaded(
            "save", self.save, "resume", records, SAVE_AT, "is what was saved loaded?", RULES, steps
        )
        return steps, loaded

    def run(self, line: ArmLine, *, plants: str = "", operations: bool = False) -> Records:
        """Launches an arm and reads what it recorded.

        Raises:
            ArmFailedError: It failed, or its recorder did.
        """
        planted = "+".join(filter(None, ("hash_tensor", self.plants, plants)))
        calls = {"level": "op", "calls": (SAVE_AT + 1, SAVE_AT + 1)} if operations else {}
        return self.session.run(line, plugin=_PLANT, plugin_argument=planted, **calls)

    def _line(self, role: Role, name: str, request: Request | None = None) -> ArmLine:
        end = SAVE_AT if role == "save" else STEPS
        return plan_rerun(request or request_for(self.recipe, self.folder), role, name=name, purpose="a trial", end=end)

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


def request_for(
    recipe: Recipe, folder: Path, *, flags: Sequence[str] = (), variables: Sequence[tuple[str, str]] = ()
) -> Request:
    """What is to be proved of a recipe.

    Args:
        recipe: What is trained, for at least ``STEPS`` steps.
        folder: For the arms.
        flags: More of the resumed run's command line.
        variables: More of its environment.
    """
    command, added = launch_command(recipe, ()), dict(_ENVIRONMENT)
    if recipe.world_size == 1:  # a launcher takes seconds, and has nothing to do
        command = [sys.executable, "-m", TRAINER, *recipe.megatron_flags()]
        added |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        added |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return Request(
        line=parse(command),
        framework="megatron-lm",
        steps=STEPS,
        save_at=(SAVE_AT - 1, SAVE_AT),
        folder=str(folder),
        site=str(site_directory()),
        environment=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(_ROOT)},
        added_environment=added,
        resume_args=tuple(flags),
        resume_environment=dict(variables),
    )


def bench_for(fault: Fault, faults: Sequence[Fault], folder: Path) -> Bench:
    """The bench on which a fault is tried, with all that others of the same recipe need too."""
    alike = [other for other in faults if other.recipe == fault.recipe]
    return Bench(
        folder / fault.recipe,
        FAULT_RECIPES[fault.recipe],
        plants=PREPARED if fault.recipe == "dense" else "",
        operations=any(other.sort == "compute" for other in alike),
    )


def narrowed(one: Records, other: Records, steps: Comparison) -> Located | None:
    """What ``verify-resume`` narrows to with reruns, from one run that recorded all calls.

    A step that is a process's first makes calls that the same step in the middle of a run does not, such as those that fill a
    cache; looking at one module at a time leaves them out.
    """
    if steps.first is None:
        return None
    return locate(steps, lambda scope: first_fault(_only(one, scope), _only(other, scope)))


def _only(records: Records, scope: str | None) -> Records:
    """Records with the calls of modules (None), or with those of the operations in a scope."""

    def wanted(call: Call) -> bool:
        if scope is None or not call.op:
            return scope is None and not call.op
        return call.op.startswith("c10d") if scope == "collectives" else in_scope(call.scope, scope)

    return {
        rank: dataclasses.replace(record, calls=[call for call in record.calls if wanted(call)])
        for rank, record in records.items()
    }


def judged(fault: Fault, row: Row) -> Row:
    """The row with what is not as expected, if anything."""
    expected = fault.expected
    if row.answer != expected.answer:
        return dataclasses.replace(row, problem=f"{row.answer}, not {expected.answer}: {row.item or 'nothing'}")
    checks: list[tuple[str, bool]] = []
    if expected.answer in ("loaded", "step"):
        checks += [
            (f"its group is {row.group}", expected.group in (None, row.group)),
            (f"its item is {row.item}", re.search(expected.item, row.item) is not None),
            (f"its rank is {row.rank}", expected.rank in (None, row.rank)),
            (f"its step is {row.step}", row.step == SAVE_AT + (expected.answer == "step")),
        ]
    checks += [
        (f"the module blamed is {row.module or 'none'}", re.search(expected.module, row.module) is not None),
        (
            f"the operation blamed is {row.operation or 'none'}",
            re.search(expected.operation, row.operation) is not None,
        ),
    ]
    return dataclasses.replace(row, problem="; ".join(what for what, right in checks if not right))


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
