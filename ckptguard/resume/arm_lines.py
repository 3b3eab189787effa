"""Which launches prove a resume, and the command of each: the user's line, what is added to it, and what it has to do.

Pure: values in, values out, so that everything can be shown before anything starts.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Literal

from ckptguard.core.errors import UsageError
from ckptguard.megatron import launch_line
from ckptguard.megatron.launch_line import Framework, LaunchLine
from ckptguard.megatron.run_flags import FLAGS, Target
from ckptguard.resume.orders import ORDER_FILE, VARIABLE

Role = Literal["reference", "repeat", "save", "load", "resume"]
CHECKPOINTS = "checkpoints"  # folder inside the save arm's

_PURPOSES: dict[Role, str] = {
    "reference": "the run without an interruption",
    "repeat": "the same again: is the run deterministic at all?",
    "save": "the run up to its save, and no further",
    "load": "new processes load what was saved and stop before any step: does the checkpoint hold the state?",
    "resume": "new processes load what was saved and go on",
}


@dataclass(frozen=True, slots=True)
class Templates:
    """The script's own arguments for arms of a loop that is no Megatron's.

    ``{steps}`` is the last step of the arm, or of the whole run where the arm saves; ``{save_at}`` the step after which it
    saves and ends; ``{dir}`` the folder for its checkpoints.

    Attributes:
        reference: For arms that run from the beginning.
        save: For the arm that saves.
        load: For arms that load what was saved.
    """

    reference: str
    save: str
    load: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be proved, and of which run.

    Attributes:
        line: The user's launch line.
        framework: Who trains.
        steps: Steps of the reference.
        save_at: Steps after which the run is saved, increasing; of which one is resumed from.
        folder: Where arms record and save; each gets a folder in it. Visible on all nodes.
        site: Folder whose ``sitecustomize`` brings the recorder in.
        environment: The user's variables.
        added_environment: Variables for every arm, such as determinism settings that ckptguard sets.
        start: Step that the run starts from: 0, or that of the user's own checkpoint. ``steps`` and ``save_at`` count from it.
        resume_from: Which of ``save_at`` is resumed from; None is the last.
        checkpoints: Where the save arm saves, such as a folder of each node's own disk; None is a folder of the arm.
        node_local: Arms that load do so from a view, which every node prepares from that folder first.
        resume_args: Arguments for arms that load, such as another layout.
        resume_environment: Variables for arms that load.
        templates: Needed for ``torch``.
    """

    line: LaunchLine
    framework: Framework
    steps: int
    save_at: tuple[int, ...]
    folder: str
    site: str
    environment: Mapping[str, str] = field(default_factory=dict)
    added_environment: Mapping[str, str] = field(default_factory=dict)
    start: int = 0
    resume_from: int | None = None
    checkpoints: str | None = None
    node_local: bool = False
    resume_args: tuple[str, ...] = ()
    resume_environment: Mapping[str, str] = field(default_factory=dict)
    templates: Templates | None = None

    @property
    def last_save(self) -> int:
        """The step after which the save arm ends."""
        return self.start + self.save_at[-1]

    @property
    def resumed_at(self) -> int:
        """The step that arms which load begin with."""
        return self.last_save if self.resume_from is None else self.start + self.resume_from


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmLine:
    """One launch, ready to start, and what it has to do.

    Attributes:
        name: ``reference``, ``repeat``, ``save``, ``load``, ``resume``, or what a narrowing rerun is called.
        role: Which of these it is, or repeats in part.
        purpose: In words.
        folder: Where it records.
        command: What is started.
        added: What the command has more than the user's line, for the script.
        environment: Variables added to the user's, or changed.
        start: Step that it must find itself at once loaded.
        end: Last step that it must make; ``start`` in an arm that only loads.
        saves: Steps after which it must have saved.
        checkpoints: Folder that it saves to, or loads from; None if it does neither.
        elsewhere: That folder may be on other nodes' disks, and not to be seen from here.
        framework: Who trains.
        world: Number of processes, if the line says so.
    """

    name: str
    role: Role
    purpose: str
    folder: str
    command: tuple[str, ...]
    added: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    start: int
    end: int
    saves: tuple[int, ...]
    checkpoints: str | None
    elsewhere: bool
    framework: Framework
    world: int | None

    @property
    def loads(self) -> bool:
        """It starts from what the save arm saved."""
        return self.role in ("load", "resume")


def plan_arms(request: Request, *, repeat: bool = False, load: bool = True) -> tuple[ArmLine, ...]:
    """The arms in the order in which they run.

    Raises:
        UsageError: Steps that make no sense, settings in the line that make a resume impossible, or templates missing.
    """
    check(request)
    left_out = {role for role, wanted in (("repeat", repeat), ("load", load)) if not wanted}
    roles = [role for role in _PURPOSES if role not in left_out]
    ends = {"save": request.save_at[-1], "load": 0}
    return tuple(_arm(request, role, role, _PURPOSES[role], ends.get(role, request.steps)) for role in roles)


def plan_rerun(request: Request, role: Role, *, name: str, purpose: str, end: int) -> ArmLine:
    """An arm again, under another name, up to another step.

    Args:
        request: As for ``plan_arms``.
        role: Which arm.
        name: What it is called, such as ``reference (modules, step 11)``; its folder is named after it.
        purpose: In words.
        end: Last step, counted from ``request.start``.
    """
    return _arm(request, role, name, purpose, end)


def start_of(line: LaunchLine, framework: Framework) -> tuple[str | None, int | None]:
    """The checkpoint folder that the user's run starts from, and the step if the line names one."""
    flags = FLAGS.get(framework)
    return flags.start(line.arguments) if flags else (None, None)


def check(request: Request) -> None:
    """Refuses what cannot be planned.

    Raises:
        UsageError: Says everything that is wrong.
    """
    steps, saves = request.steps, request.save_at
    if not saves or min(saves) < 1 or list(saves) != sorted(set(saves)):
        raise UsageError(f"saves after steps {list(saves)}: at least one, from 1 on, in increasing order, is needed")
    if saves[-1] >= steps:
        raise UsageError(
            f"the last save is after step {saves[-1]} of {steps}: nothing is left to compare after it",
            next_step="Save earlier, or make more steps.",
        )
    if request.resume_from is not None and request.resume_from not in saves:
        raise UsageError(f"nothing is saved after step {request.resume_from} to resume from, but after {list(saves)}")
    if request.node_local and request.checkpoints is None:
        raise UsageError(
            "it is not said where nodes keep their own checkpoints",
            next_step="Give --checkpoints, a directory of each node's own disk, with --node-local.",
        )
    flags = FLAGS.get(request.framework)
    if flags is None and request.node_local:
        raise UsageError("a view is prepared for checkpoints of Megatron only", next_step="Leave --node-local out.")
    if flags is None:
        if request.templates is None:
            raise UsageError(
                "how to tell this script when to stop, save and load is not known",
                next_step="Give its own arguments with --reference-args, --save-args and --load-args, in which {steps},"
                ' {save_at} and {dir} are filled in: --save-args "--steps {save_at} --save {dir}".',
            )
        return
    refusals = flags.refusals(request.line.arguments)
    if refusals:
        raise UsageError(
            "with this line no run can be resumed bit for bit: " + "; ".join(refusals),
            next_step="What is meant for the resumed run only belongs into --resume-args.",
        )
    horizon = flags.horizon(request.line.arguments)
    if horizon is not None and horizon < request.start + steps:
        raise UsageError(
            f"the line's run ends after step {horizon}, before step {request.start + steps}",
            next_step="Make fewer steps, or a longer run: its length is never changed here, since learning rates depend on it.",
        )


# ---- one arm ----


def _arm(request: Request, role: Role, name: str, purpose: str, end: int) -> ArmLine:
    folder = f"{request.folder}/{folder_name(name)}"
    loads, saves = role in ("load", "resume"), role == "save"
    # A save that is made again, to keep values, must not touch what the first one wrote.
    own = f"{folder if saves else f'{request.folder}/save'}/{CHECKPOINTS}"
    checkpoints = own if request.checkpoints is None or (saves and name != "save") else request.checkpoints
    end_step = request.resumed_at if role == "load" else request.start + end
    added = (*(request.resume_args if loads else ()), *_added(request, role, end_step, folder, checkpoints))
    environment = _environment(request, folder, loads=loads)
    hydra = launch_line.is_hydra(request.line, request.environment)
    command = launch_line.command_of(request.line, added, environment, hydra=hydra)
    return ArmLine(
        name=name,
        role=role,
        purpose=purpose,
        folder=folder,
        command=_from_view(request, command) if loads and request.node_local else command,
        added=added,
        environment=tuple(environment.items()),
        start=request.resumed_at if loads else request.start,
        end=end_step,
        saves=_saved_steps(request, end_step) if saves else (),
        checkpoints=checkpoints if loads or saves else None,
        elsewhere=checkpoints != own,
        framework=request.framework,
        world=None if loads and request.resume_args else request.line.world,
    )


def _from_view(request: Request, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command with the node's part of it run by ``ckptguard view prepare``, which has it load a view."""
    at = launch_line.start_on_node(request.line, command)
    assert request.checkpoints is not None
    prepare = (
        *(sys.executable, "-m", "ckptguard", "view", "prepare", request.checkpoints),
        *("--view", f"{request.checkpoints}.view", "--step", str(request.resumed_at), "--framework", request.framework),
    )
    return (*command[:at], *prepare, "--", *command[at:])


def folder_name(name: str) -> str:
    """A name as that of a folder: ``reference (modules, step 11)`` gives ``reference-modules-step-11``."""
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def _added(request: Request, role: Role, end_step: int, folder: str, checkpoints: str) -> tuple[str, ...]:
    flags = FLAGS.get(request.framework)
    if flags is None:
        return _filled(request, role, end_step, checkpoints)
    loads = role in ("load", "resume")
    target = Target(
        # Stopping right after loading is the recorder's work; the flag has to name a step that is still to come.
        stop_at=end_step + 1 if role == "load" else end_step,
        scratch=folder,
        save_to=checkpoints if role == "save" else None,
        save_every=_interval(request) if role == "save" else None,
        load_from=checkpoints if loads else None,
        load_step=request.resumed_at if loads else None,
        load_older=loads and request.resumed_at != request.last_save,
        hidden=request.line.wrapper is not None,
    )
    return flags.added((*request.line.arguments, *(request.resume_args if loads else ())), target)


def _filled(request: Request, role: Role, end_step: int, checkpoints: str) -> tuple[str, ...]:
    assert request.templates is not None
    choose: Callable[[Templates], str] = {"save": lambda t: t.save, "load": lambda t: t.load, "resume": lambda t: t.load}.get(
        role, lambda t: t.reference
    )  # fmt: skip
    steps = request.start + request.steps if role in ("save", "load") else end_step
    saved = end_step if role == "save" else request.resumed_at
    values = {"{steps}": str(steps), "{save_at}": str(saved), "{dir}": checkpoints}
    filled = []
    for word in shlex.split(choose(request.templates)):
        for name, value in values.items():
            word = word.replace(name, value)  # str.format would choke on other braces
        filled.append(word)
    return tuple(filled)


def _interval(request: Request) -> int:
    """Steps between saves, so that every step asked for is a multiple of it."""
    return gcd(*(request.start + step for step in request.save_at))


def _saved_steps(request: Request, end_step: int) -> tuple[int, ...]:
    """Steps after which a save arm saves: those asked for, and for Megatron every other multiple of their interval."""
    if request.framework == "torch":
        return (end_step,)
    every = _interval(request)
    return tuple(step for step in range(every, end_step + 1, every) if step > request.start)


def _environment(request: Request, folder: str, *, loads: bool) -> dict[str, str]:
    """What is added to the user's environment. Weights & Biases must not upload arms, nor write where the user's runs are."""
    resumed = dict(request.resume_environment) if loads else {}
    theirs = resumed.get("PYTHONPATH", request.environment.get("PYTHONPATH", ""))
    added = {**request.added_environment, **resumed}
    added["PYTHONPATH"] = f"{request.site}:{theirs}" if theirs else request.site
    added[VARIABLE] = f"{folder}/{ORDER_FILE}"
    added |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "PYTHONUNBUFFERED": "1"}
    exported = request.environment.get("SLURM_EXPORT_ENV")  # srun takes it for its --export
    if exported is not None and "srun" in request.line.launchers:
        added["SLURM_EXPORT_ENV"] = launch_line.exported(exported, added)
    return added
