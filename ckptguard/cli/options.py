"""Options that several commands share."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

from ckptguard.core.errors import UsageError
from ckptguard.layout.layouts import Layout

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
step_option = click.option(
    "--step", metavar="N", help="Which iteration of a checkpoint root (or `release`); by default the tracker's."
)
tensors_option = click.option(
    "--tensors",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Only tensors whose name matches; may be given several times.",
)
threads_option = click.option(
    "--threads", type=click.IntRange(1), help="Worker threads; by default as many as cores, up to 16."
)


class SizeType(click.ParamType[int]):
    """Bytes: ``2GiB``, ``500MB``, ``1073741824``; GB are powers of ten, GiB of two."""

    name = "size"
    _UNITS = {"": 1, "b": 1} | {
        f"{letter}{kind}": base ** (power + 1)
        for power, letter in enumerate("kmgt")
        for kind, base in (("b", 1000), ("ib", 1024))
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of a text."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
        if match is None or match[2] not in self._UNITS:
            self.fail(f"{value!r} is no size; write it as 2GiB or 500MB", param, ctx)
        return int(float(match[1]) * self._UNITS[match[2]])


def layout_options[C: Callable[..., Any]](command: C) -> C:
    """Sizes of the target layout; ``layout_of`` makes a value of them."""
    size = click.IntRange(1)
    for option in reversed(
        (
            click.option("--tp", type=size, default=1, show_default=True, help="Tensor parallel size."),
            click.option("--pp", type=size, default=1, show_default=True, help="Pipeline parallel size."),
            click.option("--ep", type=size, default=1, show_default=True, help="Expert parallel size."),
            click.option("--etp", type=size, help="Tensor parallel size of experts; by default --tp."),
            click.option("--vpp", type=size, default=1, show_default=True, help="Virtual stages per pipeline rank."),
            click.option("--first-pp-layers", type=size, help="Layers on the first stage, if the split is uneven."),
            click.option("--last-pp-layers", type=size, help="Layers on the last stage, if the split is uneven."),
            click.option("--pp-layout", metavar="LAYOUT", help='Megatron\'s own notation, such as "Et*3|t*4,L".'),
        )
    ):
        command = option(command)
    return command


def axes_options[C: Callable[..., Any]](command: C) -> C:
    """Sizes of a layout under our short names and Megatron-LM's own; those that are not given are None, or False."""
    size = click.IntRange(1)
    for option in reversed(
        (
            click.option("--tp", "--tensor-model-parallel-size", "tp", type=size, help="Tensor parallel size."),
            click.option("--pp", "--pipeline-model-parallel-size", "pp", type=size, help="Pipeline parallel size."),
            click.option("--ep", "--expert-model-parallel-size", "ep", type=size, help="Expert parallel size."),
            click.option(
                "--etp", "--expert-tensor-parallel-size", "etp", type=size, help="Tensor parallel size of experts."
            ),
            click.option(
                "--vpp", "--num-virtual-stages-per-pipeline-rank", "vpp", type=size, help="Virtual stages per pipeline rank."
            ),
            click.option(
                "--first-pp-layers", "--decoder-first-pipeline-num-layers", "first_pp_layers", type=size,
                help="Layers on the first stage, if the split is uneven.",
            ),
            click.option(
                "--last-pp-layers", "--decoder-last-pipeline-num-layers", "last_pp_layers", type=size,
                help="Layers on the last stage, if the split is uneven.",
            ),
            click.option(
                "--pp-layout", "--pipeline-model-parallel-layout", "pp_layout", metavar="LAYOUT",
                help='Stages in Megatron\'s own notation, such as "Et*3|t*4,L".',
            ),
            click.option(
                "--count-embedding", "--account-for-embedding-in-pipeline-split", "count_embedding", is_flag=True,
                help="The embedding counts as a layer when layers are dealt out to stages.",
            ),
            click.option(
                "--count-loss", "--account-for-loss-in-pipeline-split", "count_loss", is_flag=True,
                help="The loss counts as a layer when layers are dealt out to stages.",
            ),
            click.option(
                "--cp", "--context-parallel-size", "cp", type=size, help="Context parallel size; it cuts no tensor."
            ),
        )
    ):  # fmt: skip
        command = option(command)
    return command


def layout_of(chosen: Mapping[str, Any]) -> Layout:
    """The layout that ``layout_options`` say."""
    return Layout(**chosen)


def writing_options[C: Callable[..., Any]](command: C) -> C:
    """What every command that writes a checkpoint offers."""
    for option in reversed(
        (
            click.option(
                "--memory", type=SizeType(), default="2GiB", show_default=True, help="Most memory for buffers."
            ),
            threads_option,
            click.option("--no-verify", is_flag=True, help="Do not prove the result before it appears."),
            click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing."),
        )
    ):
        command = option(command)
    return command


def asking_early[**P, R](command: Callable[P, R]) -> Callable[P, R]:
    """Starts the process that will be asked about the model at once: its imports take longer than all else before it."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from ckptguard.megatron.ask import started_early

        with started_early():
            return command(*args, **kwargs)

    return run


def path_argument(name: str = "path", metavar: str = "PATH") -> Callable[[Command], Command]:
    """A checkpoint: iteration directory, root, Hugging Face snapshot, or hub id."""
    return click.argument(name, metavar=metavar, type=click.Path(path_type=str))


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name matches one of the globs; everything matches none at all."""
    chosen = tuple(globs)
    return lambda name: not chosen or any(fnmatch.fnmatchcase(name, glob) for glob in chosen)


def refuse_no_match(names: Iterable[str], globs: tuple[str, ...]) -> None:
    """Raises if a glob matches no tensor: a misspelt name must not look like an empty result."""
    names = list(names)
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in names):
            shown = ", ".join(sorted(names)[:5])
            raise UsageError(f"--tensors {glob!r} matches none of {len(names)} tensors (such as {shown})")


def print_json(value: object) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(value, indent=2, default=str))
