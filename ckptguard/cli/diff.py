"""``ckptguard diff``."""

from __future__ import annotations

import click

from ckptguard.cli import options
from ckptguard.cli.megatron_names import both_named, names_option, unused_ranges
from ckptguard.core.errors import ExitCode


@click.command(short_help="Compare two checkpoints across layouts and formats.")
@options.path_argument("a", "A")
@options.path_argument("b", "B")
@options.tensors_option
@click.option("--all", "everything", is_flag=True, help="List the tensors that are the same, too.")
@click.option("--step-a", metavar="N", help="Which iteration of A, if it is a root.")
@click.option("--step-b", metavar="N", help="Which iteration of B, if it is a root.")
@names_option
@options.threads_option
@options.json_option
def diff(
    a: str,
    b: str,
    globs: tuple[str, ...],
    everything: bool,
    step_a: str | None,
    step_b: str | None,
    names: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compare two checkpoints tensor by tensor, bit by bit, across layouts and formats.

    Differences in vocabulary padding rows, and in elements that belong to no parameter, are told apart and do not count.
    Exits 3 if anything that counts differs.
    """
    from ckptguard.engine.diff import diff_checkpoints
    from ckptguard.formats.registry import open_checkpoint
    from ckptguard.report.progress import progress_bar

    with (
        open_checkpoint(a, step=step_a) as opened_a,
        open_checkpoint(b, step=step_b) as opened_b,
        progress_bar() as progress,
    ):
        one, other = both_named(opened_a, opened_b, names)
        options.refuse_no_match(one.index.tensors.keys() | other.index.tensors.keys(), globs)
        diffs = diff_checkpoints(one, other, keep=options.matcher(globs), threads=threads, progress=progress)
        if spare := unused_ranges(one, diffs):
            again = {d.name for d in diffs if d.status == "different" and d.name in spare}
            told = diff_checkpoints(one, other, keep=again.__contains__, unused_ranges=spare, threads=threads)
            diffs = sorted([*told, *(d for d in diffs if d.name not in again)], key=lambda d: d.name)
    different = any(d.differs for d in diffs)
    if as_json:
        from dataclasses import asdict

        shown = [asdict(d) for d in diffs if everything or d.status != "same"]
        options.print_json(
            {"a": one.index.location, "b": other.index.location, "different": different, "tensors": shown}
        )
    else:
        from ckptguard.report import tables

        tables.print_diff(diffs, tables.console(), everything=everything)
    return int(ExitCode.DIFFERENT if different else ExitCode.OK)
