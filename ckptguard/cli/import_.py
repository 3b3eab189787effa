"""``ckptguard import``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ckptguard.cli import options
from ckptguard.core.errors import UsageError


@click.command("import", short_help="Hugging Face snapshot -> Megatron checkpoint.")
@options.path_argument("source", "SNAPSHOT")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@options.layout_options
@click.option(
    "--iteration",
    metavar="N|release",
    default="release",
    show_default=True,
    help="Step that the checkpoint is for; a release starts a run at step 0.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="[PATTERN=]DTYPE",
    help="Store tensors whose Megatron name matches as bfloat16, float16 or float32; may be given several times, the last "
    "that matches decides. By default the snapshot's own dtype, and float32 where Megatron keeps float32.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="PATTERN",
    help="Snapshot tensors that may be left out though Megatron-Bridge has no place for them; without it they are an error.",
)
@click.option(
    "--vocab-multiple",
    type=click.IntRange(1),
    metavar="N",
    help="Pad the vocabulary to a multiple of N x TP (Megatron-LM's --make-vocab-size-divisible-by); by default Bridge's N.",
)
@click.option(
    "--fp8",
    type=click.Choice(["dequantise", "keep"]),
    default="dequantise",
    show_default=True,
    help="fp8 weights become bfloat16 by their scales, since Megatron stores nothing else; `keep` keeps the scales beside "
    "the checkpoint, with which export gives the very fp8 back.",
)
@click.option(
    "--target-version",
    type=click.Choice(["any", "0.19"]),
    default="any",
    show_default=True,
    help="Megatron Core that will read it; `any` also writes common.pt, which releases before 0.19 need and 0.19 calls old.",
)
@options.writing_options
@options.json_option
@options.asking_early
def import_(
    source: str,
    target: Path,
    iteration: str,
    dtypes: tuple[str, ...],
    drop: tuple[str, ...],
    vocab_multiple: int | None,
    fp8: str,
    target_version: str,
    memory: int,
    threads: int | None,
    no_verify: bool,
    dry_run: bool,
    as_json: bool,
    **layout: Any,
) -> None:
    """Turn a Hugging Face snapshot into a Megatron checkpoint, without a GPU and in bounded memory.

    SNAPSHOT is a directory or a hub id, org/name[@revision]. DST becomes the root that Megatron-LM's --load and
    Megatron-Bridge take; it appears only when every tensor of the snapshot was put together again from the written files and
    had the same fingerprint. A run that was broken off goes on when the same command is given again.
    """  # fmt: skip
    from ckptguard.convert import importing
    from ckptguard.convert.estimates import estimate
    from ckptguard.engine.staging import refuse_present
    from ckptguard.formats.registry import open_checkpoint
    from ckptguard.report.conversions import import_plan_dict, import_plan_lines, import_result_lines, result_dict
    from ckptguard.report.progress import progress_bar

    chosen = importing.ImportOptions(
        layout=options.layout_of(layout), iteration=_iteration(iteration), dtypes=importing.dtype_rules(dtypes), drop=drop,
        pad_vocabulary_to=vocab_multiple, keep_scales=fp8 == "keep",
        old_readers=target_version == "any", verify=not no_verify, memory_bytes=memory, threads=threads,
    )  # fmt: skip
    refuse_present(target)
    with open_checkpoint(source) as checkpoint, progress_bar(wanted=not as_json) as progress:
        prepared = importing.prepare(checkpoint, _model_id(source), chosen, progress=progress)
        needs = estimate(checkpoint, target, prepared.total_bytes, verify=chosen.verify, threads=threads)
        plan = import_plan_dict(prepared, chosen, needs)
        result = None
        if not dry_run:
            what = f"import of {source}"
            result = importing.run_import(checkpoint, prepared, target, chosen, what=what, progress=progress)
    if as_json:
        options.print_json({"plan": plan, "result": result_dict(result)})
        return
    click.echo("\n".join(import_plan_lines(prepared, chosen, needs, detailed=dry_run)))
    if result is not None:
        click.echo("\n".join(import_result_lines(result)))


def _model_id(source: str) -> str:
    """What Megatron-Bridge can load the configuration from again: a path as it is, a hub id without its revision."""
    return source if Path(source).exists() else source.partition("@")[0]


def _iteration(text: str) -> Any:
    if text == "release":
        return text
    if text.isdigit() and int(text) >= 1:
        return int(text)
    raise UsageError(f"--iteration {text}: a number from 1 on, or `release`")
