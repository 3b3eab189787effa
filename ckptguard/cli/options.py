"""Options that several commands share."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from ckptguard.core.errors import UsageError

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
