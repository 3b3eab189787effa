"""``ckptguard verify-resume``."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptguard.cli import options
from ckptguard.core.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ckptguard.resume.arm_lines import ArmLine, Request
    from ckptguard.resume.results import Setting, Verification
    from ckptguard.testing.recipes import Model, Recipe
    from ckptguard.testing.resume_faults import Fault

_EXIT = {
    "equal": ExitCode.OK,
    "different": ExitCode.DIFFERENT,
    "not deterministic": ExitCode.DIFFERENT,
    "failed": ExitCode.ENVIRONMENT,
}
_MODELS: dict[str, Model] = {"gpt": "dense", "moe": "moe", "hybrid": "hybrid"}
_BUILTIN_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
_REMOTE = frozenset({"srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"})
_size = click.IntRange(1)


@click.command(
    short_help="Does a saved and resumed run go on exactly as the uninterrupted one?",
)
@click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="[-- LAUNCH LINE...]")
@click.option("--steps", type=_size, default=20, show_default=True, help="Steps of the uninterrupted run.")
@click.option(
    "--save-at",
    metavar="N[,N...]",
    help="Steps after which it is saved; half of --steps by default.",
)
@click.option("--resume-from", type=_size, metavar="N", help="Which of several saves is resumed; the last by default.")
@click.option(
    "--checkpoints",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where checkpoints are saved and loaded, such as a directory of each node's own disk; in --work by default.",
)
@click.option(
    "--node-local",
    is_flag=True,
    help="--checkpoints is on each node's own disk: arms that load have `ckptguard view prepare` bring what is missing first.",
)
@click.option("--repeat", is_flag=True, help="Run the uninterrupted run twice first: is it deterministic at all?")
@click.option("--no-load-arm", is_flag=True, help="Leave out the arm that only loads.")
@click.option(
    "--level",
    type=click.Choice(["metrics", "state"]),
    default="state",
    show_default=True,
    help="What is recorded of every step; `metrics` leaves out tensors of weights, gradients and optimizer.",
)
@click.option("--no-narrow", is_flag=True, help="Do not look for the module and the operation, or the item, to blame.")
@click.option(
    "--framework",
    type=click.Choice(["megatron-lm", "bridge", "torch"]),
    help="Who trains, where the line does not show it.",
)
@click.option(
    "--resume-args", default="", metavar="ARGS", help="More arguments for the resumed run, such as another layout."
)
@click.option(
    "--reference-args", metavar="ARGS", help="For other PyTorch loops: arguments of a whole run, with {steps} in them."
)
@click.option("--save-args", metavar="ARGS", help="The same for a run that saves after {save_at} into {dir} and ends.")
@click.option("--load-args", metavar="ARGS", help="The same for a run that resumes from {dir} up to {steps}.")
@click.option(
    "--builtin", type=click.Choice(["gpt", "moe", "hybrid"]), help="A small Megatron model in place of a launch line."
)
@click.option("--tp", type=_size, default=1, show_default=True, help="Tensor parallel size of the built-in model.")
@click.option("--pp", type=_size, default=1, show_default=True, help="Its pipeline parallel size.")
@click.option("--dp", type=_size, default=1, show_default=True, help="Its data parallel size.")
@click.option("--ep", type=_size, default=1, show_default=True, help="Its expert parallel size.")
@click.option(
    "--optimizer",
    type=click.Choice(["dp_reshardable", "fully_reshardable"]),
    default="dp_reshardable",
    show_default=True,
    help="The form in which its optimizer is saved.",
)
@click.option(
    "--plant", metavar="FAULT", help="Plant a fault in its resumed run, to see what is said; `list` names them."
)
@click.option(
    "--work",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where arms record and save, visible on all nodes; a new directory here by default.",
)
@click.option("--keep-checkpoints", is_flag=True, help="Keep what the arms saved even if nothing differs.")
@click.option(
    "--arm-timeout",
    type=click.FloatRange(1),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="For each arm.",
)
@click.option("--fix-env", is_flag=True, help="Set the variables that determinism needs, for all arms.")
@click.option(
    "--gpu/--no-gpu", "gpu", default=None, help="Whether the run uses GPUs; seen from this machine by default."
)
@click.option("--dry-run", is_flag=True, help="Show every arm's command and what is checked, and end.")
@click.option(
    "--show",
    type=click.Path(exists=True, path_type=Path),
    help="Show the report of an earlier run: its directory or its report.json.",
)
@options.json_option
def verify_resume(line: tuple[str, ...], **chosen: Any) -> int:
    """Prove that save and resume reproduces the uninterrupted run, bit for bit, on every rank.

    Give your own launch line after `--`, unchanged; the few flags that are added to it are shown first. Your checkpoint
    directories are never written. Exit code 0: equal; 3: different, with the first step, rank and item, and the module and
    operation where one is to blame; 6: an arm failed.
    """
    if chosen["show"] is not None:
        return _show(chosen["show"], as_json=chosen["as_json"])
    if chosen["plant"] == "list":
        return _list_faults()
    words, environment = _line(line, chosen)
    request, settings = _request(words, environment, chosen)
    return _verify(request, settings, chosen)


def _line(line: tuple[str, ...], chosen: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The launch line, and variables that it needs beside the user's."""
    if chosen["builtin"] is None:
        if chosen["plant"] is not None:
            raise UsageError("--plant is for the built-in models", next_step="Give --builtin gpt.")
        return line, {}
    if line:
        raise UsageError("a launch line and --builtin were both given", next_step="Give one of them.")
    from ckptguard.testing.recipes import Recipe, launch_command, launch_environment

    horizon = max(100, chosen["steps"])
    if chosen["plant"] is not None:
        recipe = dataclasses.replace(_recipe_of(chosen["plant"], chosen["builtin"]), steps=horizon)
    else:
        recipe = Recipe(
            name=chosen["builtin"], model=_MODELS[chosen["builtin"]], tp=chosen["tp"], pp=chosen["pp"], dp=chosen["dp"],
            ep=chosen["ep"], num_layers=2 * chosen["pp"], optimizer_format=chosen["optimizer"], steps=horizon,
            extra_flags=_BUILTIN_DROPOUT,
        )  # fmt: skip
    return tuple(launch_command(recipe, ())), launch_environment()


def _plantable(fault: Fault) -> bool:
    """Whether it acts in a process, without a run that is prepared for it."""
    return fault.where == "process" and not fault.prepared


def _recipe_of(plant: str, builtin: str) -> Recipe:
    """The small run in which a fault can act."""
    from ckptguard.testing.resume_faults import FAULT_RECIPES, FAULTS

    fault = FAULTS.get(plant)
    if fault is None or not _plantable(fault):
        raise UsageError(
            f"--plant {plant}: no fault that can be planted here", next_step="`--plant list` names those that can."
        )
    recipe = FAULT_RECIPES[fault.recipe]
    if recipe.model != _MODELS[builtin]:
        other = next(name for name, model in _MODELS.items() if model == recipe.model)
        raise UsageError(f"--plant {plant} has nothing to act on in this model", next_step=f"Give --builtin {other}.")
    return recipe


def _request(
    words: tuple[str, ...], needed: Mapping[str, str], chosen: Mapping[str, Any]
) -> tuple[Request, tuple[Setting, ...]]:
    """What is to be proved, and the settings that are not as they should be.

    Raises:
        UsageError: A setting makes equality impossible and was not asked to be put right.
    """
    from ckptguard.megatron.launch_line import framework_of, parse
    from ckptguard.resume import settings
    from ckptguard.resume.arm_lines import Request, Templates, start_of
    from ckptguard.resume.injected import site_directory

    parsed = parse(words)
    framework = framework_of(parsed, chosen["framework"])
    given = [chosen[name] for name in ("reference_args", "save_args", "load_args")]
    templates = Templates(*given) if all(text is not None for text in given) else None
    steps = chosen["steps"]
    environment = {**os.environ, **needed}
    gpu = _uses_gpus(parsed.launchers) if chosen["gpu"] is None else chosen["gpu"]
    found = settings.check(
        framework, parsed.arguments, environment, gpu=gpu, versions=_versions(), hidden=parsed.wrapper is not None
    )
    fixed = settings.fixed_environment(found) if chosen["fix_env"] else {}
    left = tuple(setting for setting in found if setting.name not in fixed)
    _refuse_required(left)
    resume_args = tuple(shlex.split(chosen["resume_args"]))
    settings.contradictions(framework, parsed.arguments, environment, resume_args, {})
    folder = chosen["work"] or Path(f"ckptguard-resume-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    request = Request(
        line=parsed, framework=framework, steps=steps, save_at=_save_at(chosen["save_at"], steps),
        folder=str(folder.absolute()), site=str(site_directory()), environment=environment,
        added_environment={**needed, **fixed},
        resume_from=chosen["resume_from"], node_local=chosen["node_local"],
        checkpoints=str(chosen["checkpoints"].absolute()) if chosen["checkpoints"] else None,
        start=_start(*start_of(parsed, framework)), resume_args=resume_args, templates=templates,
    )  # fmt: skip
    return request, found


def _refuse_filled(option: str, folder: str | None) -> None:
    """Refuses a folder that holds something, as far as can be seen from here: nobody's checkpoints are written over."""
    if folder is not None and Path(folder).is_dir() and any(Path(folder).iterdir()):
        raise UsageError(f"{option} {folder}: is not empty", next_step="Give a directory that is new or empty.")


def _save_at(text: str | None, steps: int) -> tuple[int, ...]:
    if text is None:
        return (max(1, steps // 2),)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--save-at {text}: not a list of steps", next_step="Write it as 10 or 5,10.") from None


def _start(folder: str | None, step: int | None) -> int:
    """The step that the user's run starts from: what it names, or what the tracker in its checkpoint folder says."""
    from ckptguard.formats.base import trackers_of

    if step is not None or folder is None:
        return step or 0
    text = trackers_of(Path(folder)).get("latest_checkpointed_iteration.txt", "")
    return int(text) if text.isdigit() else 0


def _uses_gpus(launchers: Sequence[str]) -> bool:
    """A GPU here, or a launcher that starts processes elsewhere."""
    return Path("/dev/nvidiactl").exists() or bool(_REMOTE.intersection(launchers))


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("causal-conv1d", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"):
        try:
            found["cudnn" if "cudnn" in package else package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _refuse_required(settings: Sequence[Setting]) -> None:
    required = [setting for setting in settings if setting.severity == "required"]
    if not required:
        return
    lines = [f"  {s.name}: {s.found or 'not set'}, has to be {s.wanted} ({s.why})" for s in required]
    variables = any(setting.fix == "variable" for setting in required)
    raise UsageError(
        "\n".join(["with these settings the run cannot be expected to repeat bit for bit:", *lines]),
        next_step="Add the flags to your line." + (" --fix-env sets the variables for all arms." if variables else ""),
    )


def _verify(request: Request, settings: tuple[Setting, ...], chosen: Mapping[str, Any]) -> int:
    from ckptguard.report.resume_page import page
    from ckptguard.report.resume_progress import following
    from ckptguard.report.resumes import screen, to_json
    from ckptguard.resume.arm_lines import CHECKPOINTS, plan_arms
    from ckptguard.resume.session import Plant
    from ckptguard.resume.verifying import Options, verify

    as_json, folder = chosen["as_json"], Path(request.folder)
    lines = plan_arms(request, repeat=chosen["repeat"], load=not chosen["no_load_arm"])
    if chosen["dry_run"]:
        _print_plan(lines, settings, as_json=as_json)
        return ExitCode.OK
    _refuse_filled("--work", request.folder)
    _refuse_filled("--checkpoints", request.checkpoints)
    plant = None
    if chosen["plant"] is not None:
        from ckptguard.testing.resume_faults import FAULTS

        plant = Plant("ckptguard.testing.resume_faults:plant", chosen["plant"], FAULTS[chosen["plant"]].arms)
    if not as_json:
        _print_added(lines, node_local=request.node_local)
    how = Options(
        repeat=chosen["repeat"], load=not chosen["no_load_arm"], narrow=not chosen["no_narrow"], level=chosen["level"],
        timeout_seconds=chosen["arm_timeout"], plant=plant,
    )  # fmt: skip
    with following(wanted=not as_json) as listener:
        found = verify(request, how, settings, listener)
    told = to_json(found)
    (folder / "report.html").write_text(page(found), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(told, allow_nan=False) + "\n", encoding="utf-8")
    if found.word == "equal" and not chosen["keep_checkpoints"]:
        for saved in folder.glob(f"*/{CHECKPOINTS}"):
            shutil.rmtree(saved)
    if as_json:
        options.print_json(told)
    else:
        click.echo("\n".join(screen(found, folder)))
    return _EXIT[found.word]


def _print_added(lines: Sequence[ArmLine], *, node_local: bool) -> None:
    """What is added to the user's line, arm by arm, before anything starts."""
    if node_local:
        click.echo("  arms that load go through `ckptguard view prepare`, which has them load a view", err=True)
    for line in lines:
        click.echo(
            f"  {line.name:<10} your line {shlex.join(('+', *line.added)) if line.added else 'as it is'}", err=True
        )


def _print_plan(lines: Sequence[ArmLine], settings: Sequence[Setting], *, as_json: bool) -> None:
    if as_json:
        options.print_json(
            {
                "arms": [dataclasses.asdict(line) for line in lines],
                "settings": [dataclasses.asdict(setting) for setting in settings],
            }
        )
        return
    for line in lines:
        click.echo(f"{line.name}: {line.purpose}")
        click.echo(f"  steps {line.start + 1} to {line.end}" if line.end > line.start else f"  loads step {line.start}")
        for name, value in line.environment:
            click.echo(f"  {name}={shlex.quote(value)}")
        click.echo(f"  {shlex.join(line.command)}\n")
    for setting in settings:
        click.echo(
            f"{setting.severity}: {setting.name} is {setting.found or 'not set'}, has to be {setting.wanted}: {setting.why}"
        )


def _list_faults() -> int:
    from ckptguard.testing.resume_faults import FAULTS

    for name, fault in FAULTS.items():
        if _plantable(fault):
            click.echo(f"{name:<24} {fault.what}")
    return ExitCode.OK


def _show(path: Path, *, as_json: bool) -> int:
    """The report of an earlier run again, with its exit code."""
    from ckptguard.core.errors import DamagedError
    from ckptguard.report.resumes import from_json, screen, to_json

    file = path / "report.json" if path.is_dir() else path
    try:
        found: Verification = from_json(json.loads(file.read_text()), str(file))
    except (OSError, ValueError) as error:
        raise DamagedError(f"{file}: not a report of verify-resume ({error})") from error
    if as_json:
        options.print_json(to_json(found))
    else:
        click.echo("\n".join(screen(found, file.parent)))
    return _EXIT[found.word]
