"""Where commands ask Megatron about structure: global names of legacy files, and which bucket elements nobody owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ckptguard.core.errors import EnvironmentFailedError, UnsupportedError

if TYPE_CHECKING:
    from ckptguard.engine.diff import Ranges, TensorDiff
    from ckptguard.formats.base import Checkpoint

names_option = click.option(
    "--names",
    type=click.Choice(["auto", "global", "rank"]),
    default="auto",
    show_default=True,
    help="Legacy mp_rank files: Megatron's global names, or each rank's own. auto: global where Megatron can tell them.",
)


def named(checkpoint: Checkpoint, names: str) -> Checkpoint:
    """The checkpoint under global names, if it is one of legacy files and Megatron can tell them.

    Raises:
        UnsupportedError, EnvironmentFailedError: Global names were asked for and cannot be had.
    """
    if checkpoint.index.format != "torch" or names == "rank":
        return checkpoint
    from ckptguard.megatron.legacy_names import to_global

    try:
        return replace(checkpoint, index=to_global(checkpoint.index))
    except (UnsupportedError, EnvironmentFailedError) as error:
        if names == "global":
            raise
        click.echo(f"note: {checkpoint.index.location}: listed under each rank's own names: {error.message}", err=True)
        return checkpoint


def both_named(a: Checkpoint, b: Checkpoint, names: str) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints under names that can be compared; legacy files of one layout compare under their own."""
    alike = a.index.format == b.index.format and a.index.tensors.keys() == b.index.tensors.keys()
    if names == "auto" and alike:
        return a, b
    return named(a, names), named(b, names)


def unused_ranges(checkpoint: Checkpoint, diffs: Sequence[TensorDiff]) -> dict[str, Ranges]:
    """Elements of optimizer buckets that belong to no parameter, if any bucket differs; else nothing is asked."""
    from ckptguard.megatron.buckets import bucket_of, unused_ranges

    if not any(d.status == "different" and bucket_of(d.name) for d in diffs):
        return {}
    try:
        return dict(unused_ranges(checkpoint.index))
    except (UnsupportedError, EnvironmentFailedError) as error:
        click.echo(f"note: padding inside optimizer buckets is not told apart: {error.message}", err=True)
        return {}
