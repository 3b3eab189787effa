"""``ckptguard export``."""

from __future__ import annotations

from pathlib import Path

import click

from ckptguard.cli import options


@click.command(short_help="Megatron checkpoint -> Hugging Face snapshot.")
@options.path_argument("source", "CHECKPOINT")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option(
    "--reference",
    metavar="SNAPSHOT",
    help="Write config.json, tokenizer, tensor names and dtypes like this snapshot: a directory, a hub id, or a directory "
    "with config.json and tokenizer only. By default what `ckptguard import` or Megatron-Bridge stored in the checkpoint's "
    "tokenizer/, names as Megatron-Bridge exports them, dtypes as stored.",
)
@click.option(
    "--max-shard-size",
    type=options.SizeType(),
    default="5GB",
    show_default=True,
    help="Most bytes of tensors in a safetensors file; a larger tensor has a file of its own.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="[PATTERN=]DTYPE",
    help="Write tensors whose Hugging Face name matches as bfloat16, float16 or float32, rounding if need be; may be given "
    "several times, the last that matches decides. Without it a value that does not fit is an error.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="PATTERN",
    help="Tensors, by their name on either side, that may be left out though the other side has no place or source for "
    "them; without it they are an error.",
)
@click.option(
    "--fp8",
    type=click.Choice(["bfloat16", "restore"]),
    default="bfloat16",
    show_default=True,
    help="`restore` gives fp8 weights back bit for bit by the scales that `import --fp8 keep` kept.",
)
@options.step_option
@options.writing_options
@options.json_option
@options.asking_early
def export(
    source: str,
    target: Path,
    reference: str | None,
    max_shard_size: int,
    dtypes: tuple[str, ...],
    drop: tuple[str, ...],
    fp8: str,
    step: str | None,
    memory: int,
    threads: int | None,
    no_verify: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Turn the model in a Megatron checkpoint into a Hugging Face snapshot, without a GPU and in bounded memory.

    CHECKPOINT is an iteration directory or a root: torch_dist, torch_dcp or legacy mp_rank files, under any layout. DST
    becomes a directory that transformers, vLLM and safetensors load; it appears only when every stored chunk of the model
    was put together again from the written files and had the same fingerprint. Optimizer and RNG state stay behind. Weights
    that are quantised in the reference are written as bfloat16. A run that was broken off goes on when the same command is
    given again.
    """
    from ckptguard.convert import exporting
    from ckptguard.convert.importing import dtype_rules
    from ckptguard.engine.staging import refuse_present
    from ckptguard.formats.registry import open_checkpoint
    from ckptguard.report.conversions import result_dict
    from ckptguard.report.exports import export_plan_dict, export_plan_lines, export_result_lines
    from ckptguard.report.progress import progress_bar

    chosen = exporting.ExportOptions(
        max_shard_bytes=max_shard_size, dtypes=dtype_rules(dtypes), drop=drop, restore_fp8=fp8 == "restore",
        verify=not no_verify, memory_bytes=memory, threads=threads,
    )  # fmt: skip
    refuse_present(target)
    with open_checkpoint(source, step=step) as checkpoint, progress_bar(wanted=not as_json) as progress:
        prepared = exporting.prepare_export(checkpoint, reference, chosen, progress=progress)
        plan = export_plan_dict(prepared, chosen)
        result = None
        if not dry_run:
            what = f"export of {source}"
            result = exporting.run_export(checkpoint, prepared, target, chosen, what=what, progress=progress)
    if as_json:
        options.print_json({"plan": plan, "result": result_dict(result)})
        return
    click.echo("\n".join(export_plan_lines(prepared, chosen, detailed=dry_run)))
    if result is not None:
        click.echo("\n".join(export_result_lines(result)))
