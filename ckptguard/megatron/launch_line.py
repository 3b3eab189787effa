"""The user's launch line: its launchers, the script it runs, and where arguments and variables can be added.

Nothing is started and nothing read here. A line is understood as far as it is needed; what is not understood stays as it is.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from ckptguard.core.errors import UsageError
from ckptguard.megatron import shell_text
from ckptguard.megatron.run_flags import flag_value

Framework = Literal["megatron-lm", "bridge", "torch"]
FRAMEWORKS: tuple[Framework, ...] = Framework.__args__  # type: ignore[attr-defined]

_TORCHRUN = frozenset({"torchrun", "ft_launcher", "torch.distributed.run", "torch.distributed.launch"})
_MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"})
_SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?t?")
# They start the script in an environment of their own, without our variables, or do not wait for its end.
_ELSEWHERE = frozenset({"docker", "podman", "kubectl", "ssh", "sudo", "sbatch"})
_TORCHRUN_SWITCHES = frozenset(
    {"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--use-env"}
)
_BRIDGE_SECTIONS = frozenset(  # fields of megatron/bridge/training/config.py::ConfigContainer, 0.6.2
    {"train", "checkpoint", "model", "optimizer", "scheduler", "dataset", "logger", "ddp", "dist", "rng", "tokenizer",
     "validation", "comm_overlap", "mixed_precision", "profiling", "peft", "rerun_state_machine"}
)  # fmt: skip
_LM_FLAGS = ("--train-iters", "--train-samples", "--micro-batch-size", "--tensor-model-parallel-size", "--num-layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """A launch line, understood.

    Attributes:
        words: The command as given.
        launchers: What it goes through, outermost first, such as ``("srun", "bash", "torchrun")``.
        script: Path or module that trains; None where a wrapper hides it.
        arguments: The script's own, as far as they can be seen.
        wrapper: The shell script or program that hides the rest; None if nothing is hidden.
        nodes: Number of nodes, if the line says so.
        world: Number of processes on all nodes, if the line says so.
        shell_word: Index of the text that ``bash -c`` runs; None if there is none.
        arguments_end: Where in that text the script's arguments end; None if they end the line.
        launch_words: How many words belong to launchers, before the script's arguments.
        torchrun: Options of torchrun, dashes in their names; None if the line has no torchrun that can be seen.
        isolated: The letter of an option by which Python ignores PYTHONPATH or sitecustomize; "" if there is none.
    """

    words: tuple[str, ...]
    launchers: tuple[str, ...]
    script: str | None = None
    arguments: tuple[str, ...] = ()
    wrapper: str | None = None
    nodes: int | None = None
    world: int | None = None
    shell_word: int | None = None
    arguments_end: int | None = None
    launch_words: int = 0
    torchrun: tuple[str, ...] | None = None
    isolated: str = ""

    @property
    def framework(self) -> Framework | None:
        """What the arguments show; None if they show nothing."""
        if any(_is_bridge(word) for word in self.arguments) or "--recipe" in self.arguments:
            return "bridge"
        if any(flag_value(self.arguments, flag) is not None for flag in _LM_FLAGS):
            return "megatron-lm"
        return None

    @property
    def spreads(self) -> str | None:
        """The launcher in it that may start processes on other nodes; None if there is none."""
        return next((name for name in self.launchers if name == "srun" or name in _MPI), None)


def _is_bridge(word: str) -> bool:
    key, equals, _ = word.partition("=")
    section, dot, _ = key.lstrip("+~").partition(".")
    return bool(equals and dot) and section in _BRIDGE_SECTIONS


def parse(words: Sequence[str]) -> LaunchLine:
    """Understands a launch line whose processes are to be recorded.

    Raises:
        UsageError: Nothing to start, or something through which nothing can be recorded.
    """
    line = understand(words)
    if line.isolated:
        raise UsageError(
            f"python -{line.isolated} ignores PYTHONPATH or sitecustomize, by which recording is brought in",
            next_step=f"Take -{line.isolated} out of the line.",
        )
    return line


def understand(words: Sequence[str]) -> LaunchLine:
    """Understands a launch line.

    Raises:
        UsageError: Nothing to start, or something that starts it elsewhere.
    """
    if not words:
        raise UsageError(
            "there is nothing to start", next_step="Give the launch line after `--`: ... -- torchrun train.py."
        )
    return _parse(tuple(words), 0, LaunchLine(words=tuple(words), launchers=()))


def framework_of(line: LaunchLine, given: str | None) -> Framework:
    """The framework that is given, or that the line shows.

    Raises:
        UsageError: It is not given and cannot be seen, or is not known.
    """
    known = next((framework for framework in FRAMEWORKS if framework == given), None)
    if given is not None and known is None:
        raise UsageError(f"{given}: not a framework", next_step=f"Known are {', '.join(FRAMEWORKS)}.")
    found = known or line.framework
    if found is None:
        hidden = f"what {line.wrapper} starts cannot be seen" if line.wrapper else f"{line.script} shows no flag of one"
        raise UsageError(
            f"which framework trains is not known: {hidden}",
            next_step="Add --framework megatron-lm, bridge or torch. Flags are added at the end of the line"
            + (f', so {line.wrapper} has to pass its arguments ("$@") on to the trainer.' if line.wrapper else "."),
        )
    return found


def start_on_node(line: LaunchLine, words: Sequence[str]) -> int:
    """Where the part of a line begins that is run once on each node: after srun or mpirun, if it goes through one.

    Args:
        line: As understood.
        words: Its words, or more of them, as ``command_of`` gives.

    Returns:
        An index into ``words``.

    Raises:
        UsageError: No part of it is run once on each node, as far as can be seen.
    """
    if line.spreads is None:
        return 0
    at = next((at for at, word in enumerate(words) if PurePath(word).name == line.spreads), None)
    begin = None if at is None else _next_program(tuple(words), at + 1)
    each_rank = line.torchrun is None and (line.wrapper is None or line.world not in (None, line.nodes))
    if begin is None or each_rank:
        raise UsageError(
            f"{line.spreads} starts every rank, or cannot be seen through: what runs once on each node is needed",
            next_step=f"Write the line with torchrun, one task per node: {line.spreads} ... torchrun --nnodes N ...",
        )
    return begin


# ---- understanding ----


def _parse(words: tuple[str, ...], begin: int, line: LaunchLine) -> LaunchLine:
    """Goes through launchers from ``begin`` on."""
    at = _next_program(words, begin)
    if at is None:
        hidden = next((word for word in words[begin:] if not word.startswith("-")), words[0])
        return dataclasses.replace(line, wrapper=hidden, launch_words=min(begin + 1, len(words)))
    name = PurePath(words[at]).name
    line = dataclasses.replace(line, launchers=(*line.launchers, name))
    if name in _ELSEWHERE:
        raise UsageError(
            f"{name} starts the run elsewhere, where it can neither be followed nor waited for",
            next_step=f"Start ckptguard on the other side of {name}, around the training command itself.",
        )
    if name in _TORCHRUN:
        return _torchrun(words, at + 1, line)
    if name == "srun" or name in _MPI:
        inner = _next_program(words, at + 1)
        options = words[at + 1 : inner if inner is not None else at + 1]
        return _parse(words, at + 1, _counted(line, name, options))
    if name in _SHELLS:
        return _shell(words, at + 1, line)
    if _PYTHON.fullmatch(name):
        return _python(words, at + 1, line)
    line = dataclasses.replace(line, launchers=line.launchers[:-1] or (name,))
    if name.endswith(".py"):  # run by itself, or by a launcher that is not known here
        return _script(words, at, line)
    return dataclasses.replace(line, wrapper=words[at], arguments=words[at + 1 :], launch_words=at + 1)


def _next_program(words: tuple[str, ...], begin: int) -> int | None:
    """Index of the next word that names a program known here, or a script."""
    for at in range(begin, len(words)):
        word, name = words[at], PurePath(words[at]).name
        if word.startswith("-") or "=" in word:
            continue
        if name in _TORCHRUN | _MPI | _SHELLS | _ELSEWHERE or name == "srun" or _PYTHON.fullmatch(name):
            return at
        if name.endswith((".py", ".sh")):
            return at
    return None


def _script(words: tuple[str, ...], at: int, line: LaunchLine) -> LaunchLine:
    if at >= len(words):
        raise UsageError(f"the line ends before it names a script: {shlex.join(words)}")
    return dataclasses.replace(line, script=words[at], arguments=words[at + 1 :], launch_words=at + 1)


def _python(words: tuple[str, ...], at: int, line: LaunchLine) -> LaunchLine:
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        option = words[at]
        letters = "" if option.startswith(("--", "-W", "-X")) else option[1:]
        blocked = [letter for letter in letters.partition("m")[0].partition("c")[0] if letter in "EIS"]
        line = dataclasses.replace(line, isolated="".join([line.isolated, *blocked])[:1])
        if letters.endswith("m") and at + 1 < len(words):
            if words[at + 1] in _TORCHRUN:
                launchers = (*line.launchers[:-1], words[at + 1])
                return _torchrun(words, at + 2, dataclasses.replace(line, launchers=launchers))
            return _script(words, at + 1, line)
        if letters.endswith("c") and at + 1 < len(words):
            found = _script(words, at + 1, line)
            return dataclasses.replace(found, script="-c")
        at += 2 if option in ("-W", "-X") else 1
    return _script(words, at, line)


def _torchrun(words: tuple[str, ...], at: int, line: LaunchLine) -> LaunchLine:
    """torch/distributed/run.py, 2.14: all options but a few switches have a value; the first other word is the script."""
    begin = at
    while at < len(words) and words[at].startswith("-"):
        name = words[at].partition("=")[0].replace("_", "-")
        at += 1 if "=" in words[at] or name in _TORCHRUN_SWITCHES else 2
    options = [_with_dashes(word) if word.startswith("-") else word for word in words[begin:at]]
    nodes = 1 if "--standalone" in options else _count(flag_value(options, "--nnodes") or "1")
    each = _count(flag_value(options, "--nproc-per-node") or "1")
    world = nodes * each if nodes is not None and each is not None else None
    line = dataclasses.replace(line, nodes=nodes, world=world, torchrun=tuple(options))
    if "--no-python" in options:
        return _parse(words, at, line)
    return _script(words, at, line)


def _with_dashes(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def _counted(line: LaunchLine, name: str, options: Sequence[str]) -> LaunchLine:
    """What srun or mpirun says of nodes and processes."""
    short = [part for word in options for part in _split_short(word)]
    if name == "srun":
        nodes = _count(flag_value(short, "-N", "--nodes"))
        total = _count(flag_value(short, "-n", "--ntasks"))
        each = _count(flag_value(short, "--ntasks-per-node"))
        total = total or (nodes * each if nodes and each else None)
        return dataclasses.replace(line, nodes=nodes, world=total)
    return dataclasses.replace(line, world=_count(flag_value(short, "-n", "-np", "--np", "-c")))


def _split_short(word: str) -> list[str]:
    """``-N2`` as ``-N 2``."""
    match = re.fullmatch(r"(-[Nn])(\d+)", word)
    return [match[1], match[2]] if match else [word]


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _shell(words: tuple[str, ...], at: int, line: LaunchLine) -> LaunchLine:
    while at < len(words) and words[at].startswith("-"):
        if not words[at].startswith("--") and words[at].endswith("c"):
            return _shell_text(words, at + 1, line)
        at += 2 if re.fullmatch(r"-\w*[oO]|--rcfile|--init-file", words[at]) else 1
    if at >= len(words):
        raise UsageError(f"{line.launchers[-1]} is given neither a script nor -c")
    return dataclasses.replace(line, wrapper=words[at], arguments=words[at + 1 :], launch_words=at + 1)


def _shell_text(words: tuple[str, ...], at: int, line: LaunchLine) -> LaunchLine:
    if line.shell_word is not None:
        raise UsageError("a shell inside a shell: where flags have to be added cannot be seen")
    if at >= len(words):
        raise UsageError(f"{line.launchers[-1]} -c is given no command")
    try:
        commands = shell_text.commands(words[at])
    except ValueError as error:
        raise UsageError(f"{line.launchers[-1]} -c: {error}: {words[at]}") from error
    if not commands:
        raise UsageError(f"{line.launchers[-1]} -c is given an empty command")
    chosen = max(enumerate(commands), key=lambda numbered: (_weight(numbered[1]), numbered[0]))[1]
    texts = tuple(word.text for word in chosen)
    inner = _parse(texts, 0, dataclasses.replace(line, shell_word=at, arguments_end=chosen[-1].end))
    if texts[-1] not in ("$@", "$*"):
        return dataclasses.replace(inner, launch_words=at + 1)
    arguments = (*inner.arguments[:-1], *words[at + 2 :])  # the first word after the text is $0
    zero = () if len(words) > at + 1 else (line.launchers[-1],)
    return dataclasses.replace(
        inner, words=(*words, *zero), arguments=arguments, arguments_end=None, launch_words=at + 1
    )


def _weight(command: tuple[shell_text.Word, ...]) -> int:
    """How much a command of a script looks like the one that trains."""
    words = tuple(word.text for word in command)
    if words[0] in ("source", ".", "export", "cd", "echo", "mkdir"):
        return 0
    at = _next_program(words, 0)
    if at is None:
        return 1
    name = PurePath(words[at]).name
    if name in _TORCHRUN | _MPI or name == "srun" or any(word in _TORCHRUN for word in words):
        return 4
    return 3 if _PYTHON.fullmatch(name) or name.endswith(".py") else 2


# ---- putting together ----


def command_of(
    line: LaunchLine, arguments: Sequence[str], environment: Mapping[str, str], *, hydra: bool = False
) -> tuple[str, ...]:
    """The line with arguments added for the script, and with launchers told to pass variables on.

    Args:
        line: The user's.
        arguments: What comes after the script's own arguments.
        environment: Variables that are set for the launcher, and that every process has to get. Where the line itself sets
            ``PYTHONPATH``, the first entry of ours is put before its value.
        hydra: The MPI launcher is MPICH's or Intel's, not Open MPI's.
    """
    words = list(line.words)
    site = environment.get("PYTHONPATH", "").partition(":")[0]
    if line.arguments_end is None:
        words += arguments
    elif line.shell_word is not None:
        text, end = words[line.shell_word], line.arguments_end
        quoted = "".join(f" {shlex.quote(argument)}" for argument in arguments)
        words[line.shell_word] = text[:end] + quoted + text[end:]
    if site:
        for at in range(line.launch_words):
            words[at] = _with_path(words[at], site, in_shell=at == line.shell_word)
            if words[at - 1] == "PYTHONPATH" and at > 1 and words[at - 2] in ("-genv", "-env"):
                words[at] = f"{site}:{words[at]}"
    for at in reversed(range(line.launch_words)):
        name = PurePath(words[at]).name
        if name == "srun":
            words[at + 1 :] = _exported(words[at + 1 :], environment)
        elif name in _MPI and name in line.launchers:
            words[at + 1 : at + 1] = _mpi_options(words[at + 1 : line.launch_words], environment, hydra=hydra)
    return tuple(words)


def _with_path(word: str, site: str, *, in_shell: bool) -> str:
    """The site folder before every value that the word gives to PYTHONPATH."""
    if not in_shell:
        return re.sub(r"(^|,)PYTHONPATH=", lambda match: f"{match[0]}{site}:", word)
    return re.sub(
        r"(?<![\w$])PYTHONPATH=(?=\S)(['\"]?)", lambda match: f"{match[0]}{_in_quotes(site, match[1])}:", word
    )


def _in_quotes(path: str, quote: str) -> str:
    return path if quote else shlex.quote(path)


def _exported(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """Words after ``srun``, with ``--export`` letting our variables through; without it srun passes everything."""
    for at, word in enumerate(words):
        if word.startswith("--export="):
            return [*words[:at], f"--export={exported(word.removeprefix('--export='), environment)}", *words[at + 1 :]]
        if word == "--export" and at + 1 < len(words):
            return [*words[: at + 1], exported(words[at + 1], environment), *words[at + 2 :]]
        if not word.startswith("-") and _next_program((word,), 0) is not None:
            break
    return words


def exported(value: str, environment: Mapping[str, str]) -> str:
    """A value of srun's ``--export``, or of ``SLURM_EXPORT_ENV``, that lets our variables through."""
    parts = [part for part in value.split(",") if part not in ("NONE", "NIL")]
    if "ALL" in parts:
        return value
    there = {part.partition("=")[0] for part in parts}
    return ",".join([*parts, *(name for name in environment if name not in there)])


def _mpi_options(words: Sequence[str], environment: Mapping[str, str], *, hydra: bool) -> list[str]:
    """Open MPI: ``-x NAME``. Hydra: ``-genv NAME VALUE``, which adds to what it passes on; ``-genvlist`` would replace it."""
    there = {
        word.partition("=")[0] for before, word in zip(("", *words), words, strict=False) if before in ("-x", "-genv")
    }
    added: list[str] = []
    for name, value in environment.items():
        if name not in there:
            added += ["-genv", name, value] if hydra else ["-x", name]
    return added


def is_hydra(line: LaunchLine, environment: Mapping[str, str]) -> bool:
    """Whether the MPI launcher of the line looks like MPICH's or Intel's."""
    options = line.words[: line.launch_words]
    if "mpiexec.hydra" in line.launchers or any(
        o in ("-genv", "-genvlist", "-genvall", "-ppn", "-hosts") for o in options
    ):
        return True
    return "I_MPI_ROOT" in environment and not any(
        option in ("-x", "--mca", "--map-by", "--bind-to") for option in options
    )
