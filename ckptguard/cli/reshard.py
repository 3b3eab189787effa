"""``ckptguard reshard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ckptguard.cli import options
from ckptguard.core.errors import UsageError
from ckptguard.layout.layouts import Layout
from ckptguard.layout.uneven import parse_parts, parse_replicas

_STAGES = ("vpp", "first_pp_layers", "last_pp_layers", "pp_layout", "count_embedding", "count_loss")


@click.command(short_help="Any layout and form -> any other, weights and optimizer.")
@options.path_argument("source", "SRC")
@click.argument("target", metavar="[DST]", required=False)
@options.step_option
@options.axes_options
@click.option(
    "--dp", type=click.IntRange(1), help="Data parallel size; by default as many ranks as before, if they fit."
)
@click.option("--sp", "--sequence-parallel", "sp", is_flag=True, help="Accepted; sequence parallelism cuts no tensor.")
@click.option(
    "--replica-tp",
    multiple=True,
    metavar="REPLICA=TP",
    help="A data parallel replica that lost GPUs and goes on with a smaller TP, 1=6: its ranks' shards are written too, as a "
    "checkpoint of their own in DST/replica_1. May be given several times.",
)
@click.option(
    "--tp-for",
    multiple=True,
    metavar="PATTERN=TP",
    help="A TP (of experts: ETP) of its own for a part of the model, 'decoder.layers.*.mlp.*=4', in these replicas or, without "
    "--replica-tp, in all of DST. May be given several times; the last pattern that matches counts.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["keep", "dp_reshardable", "fully_reshardable", "none"]),
    default="keep",
    show_default=True,
    help="How the optimizer's state is stored; `keep` is the form it has, or fully_reshardable where Megatron no longer "
    "reads that one; `none` leaves the state out.",
)
@click.option(
    "--to",
    "to",
    type=click.Choice(["torch_dist", "torch", "fsdp_dtensor", "dcp"]),
    default="torch_dist",
    show_default=True,
    help="Form of the target: today's, legacy mp_rank_* files, Megatron-FSDP's, or plain torch DCP under Megatron's names.",
)
@click.option(
    "--files", type=click.IntRange(1), help="Files of fsdp_dtensor and dcp; one per rank of the target by default."
)
@click.option(
    "--arg",
    "single_args",
    multiple=True,
    metavar="NAME=VALUE",
    help="A training argument of the run that saved SRC, where SRC does not store it: transformer_impl=local.",
)
@click.option(
    "--args",
    "args_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Such arguments in a JSON or YAML file.",
)
@click.option(
    "--list-layouts", is_flag=True, help="List the layouts that fit --gpus GPUs, with bytes per rank, and end."
)
@click.option("--gpus", type=click.IntRange(1), help="For --list-layouts.")
@click.option(
    "--target-version",
    type=click.Choice(["any", "0.19"]),
    default="any",
    show_default=True,
    help="Megatron Core that will read it; `any` also writes common.pt, which releases before 0.19 need.",
)
@click.option(
    "--rdzv",
    metavar="HOST:PORT",
    help="Where the ranks of srun meet, a free port of rank 0's host; torchrun says it itself.",
)
@options.writing_options
@options.json_option
def reshard(
    source: str,
    target: str | None,
    step: str | None,
    replica_tp: tuple[str, ...],
    tp_for: tuple[str, ...],
    optimizer: str,
    to: str,
    files: int | None,
    single_args: tuple[str, ...],
    args_file: str | None,
    list_layouts: bool,
    gpus: int | None,
    target_version: str,
    sp: bool,
    rdzv: str | None,
    memory: int,
    threads: int | None,
    no_verify: bool,
    dry_run: bool,
    as_json: bool,
    **axes: Any,
) -> None:
    """Change the layout of a checkpoint, and the form of its optimizer state, without a GPU and in bounded memory.

    SRC is an iteration directory or a root of any Megatron form. DST becomes a root that --load takes; it appears only when
    every tensor of it was read back and had the fingerprint that it has in SRC. Sizes that are not given stay as they are. A
    run that was broken off goes on when the same command is given again.
    """  # fmt: skip
    from ckptguard.formats.registry import open_checkpoint

    if list_layouts:
        with open_checkpoint(source, step=step) as checkpoint:
            _list_layouts(checkpoint, gpus, as_json=as_json)
        return
    if target is None:
        raise UsageError("DST is missing", next_step="Give the directory that is to become the new checkpoint.")
    _reshard(
        source, target, step=step, axes=axes, sp=sp, rdzv=rdzv, dry_run=dry_run, as_json=as_json,
        chosen={
            "optimizer": optimizer, "old_readers": target_version == "any", "verify": not no_verify, "memory_bytes": memory,
            "threads": threads, "to": to, "files": files, "args": _args(args_file, single_args),
            "replica_tp": parse_replicas(replica_tp), "tp_for": parse_parts(tp_for),
        },
    )  # fmt: skip


def _reshard(
    source: str,
    target: str,
    *,
    step: str | None,
    axes: Mapping[str, Any],
    sp: bool,
    rdzv: str | None,
    dry_run: bool,
    as_json: bool,
    chosen: Mapping[str, Any],
) -> None:
    from ckptguard.convert.estimates import estimate
    from ckptguard.convert.reshard_prepare import prepare_reshard
    from ckptguard.convert.reshard_source import layout_of
    from ckptguard.convert.resharding import ReshardOptions, run_reshard
    from ckptguard.engine.peers import joined
    from ckptguard.engine.ranks import world
    from ckptguard.engine.staging import refuse_present
    from ckptguard.formats.registry import open_checkpoint
    from ckptguard.formats.remote import RemotePath, path_of
    from ckptguard.report.progress import progress_bar
    from ckptguard.report.reshards import (
        reshard_plan_dict,
        reshard_plan_lines,
        reshard_result_dict,
        reshard_result_lines,
    )
    from ckptguard.report.uneven import uneven_dict, uneven_lines

    where = path_of(target)
    with (
        joined(world(rdzv)) as peers,
        open_checkpoint(source, step=step) as checkpoint,
        progress_bar(wanted=not as_json and peers.world.first) as progress,
    ):
        if peers.world.first and not isinstance(where, RemotePath):
            refuse_present(where)
        layout = resolved(layout_of({**checkpoint.index.facts.args, **chosen["args"]}), axes)
        wanted = ReshardOptions(layout=layout, **chosen)
        prepared = prepare_reshard(checkpoint, wanted)
        needs = estimate(checkpoint, where, prepared.total_bytes, verify=wanted.verify, threads=wanted.threads)
        result = None
        if not dry_run:
            result = run_reshard(prepared, where, wanted, what=f"reshard of {source}", progress=progress, peers=peers)
    if not peers.world.first:
        return
    if as_json:
        options.print_json(
            {
                "plan": reshard_plan_dict(prepared, wanted, needs) | uneven_dict(prepared),
                "result": reshard_result_dict(result),
            }
        )
        return
    click.echo("\n".join(reshard_plan_lines(prepared, wanted, needs, detailed=dry_run)))
    for line in uneven_lines(prepared):
        click.echo(line)
    if sp:
        click.echo("  note --sequence-parallel cuts no tensor: nothing in the checkpoint depends on it")
    if result is not None:
        click.echo("\n".join(reshard_result_lines(result)))


def _args(file: str | None, single: tuple[str, ...]) -> dict[str, object]:
    """Training args that were given, single ones after those of the file; values as YAML reads them."""
    import yaml

    out: dict[str, object] = {}
    try:
        if file is not None:
            said = yaml.safe_load(Path(file).read_text())
            if not isinstance(said, dict):
                raise UsageError(f"--args {file}: holds {type(said).__name__}, not names with values")
            out |= {str(name): value for name, value in said.items()}
        for text in single:
            name, sign, value = text.partition("=")
            if not sign:
                raise UsageError(f"--arg {text}: not of the form NAME=VALUE")
            out[name.strip().removeprefix("--").replace("-", "_")] = yaml.safe_load(value)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"training args that are neither JSON nor YAML: {error}") from error
    return out


def resolved(before: Layout, axes: Mapping[str, Any]) -> Layout:
    """The target's layout: what was given, and the source's for the rest.

    How layers are cut into stages is one choice: where any of it is given, or PP is another one, none of the source's is kept.
    Experts' TP follows TP where it did before.
    """
    given = {name: value for name, value in axes.items() if value not in (None, False)}
    pp = given.get("pp", before.pp)
    cut_anew = pp != before.pp or any(name in given for name in _STAGES)
    default = Layout()
    stages = {name: given.get(name, getattr(default if cut_anew else before, name)) for name in _STAGES}
    follows = before.etp in (None, before.tp)
    return Layout(
        tp=given.get("tp", before.tp),
        pp=pp,
        ep=given.get("ep", before.ep),
        etp=given.get("etp", None if follows else before.etp),
        cp=given.get("cp", before.cp),
        dp=given.get("dp"),
        **stages,
    )


def _list_layouts(checkpoint: Any, gpus: int | None, *, as_json: bool) -> None:
    from ckptguard.layout.possible import possible
    from ckptguard.megatron.legacy_names import to_global
    from ckptguard.megatron.model_numbers import counts_of
    from ckptguard.report.layouts import layout_lines, layouts_dict

    if gpus is None:
        raise UsageError("--list-layouts needs --gpus N")
    index = checkpoint.index
    candidates = possible(counts_of(to_global(index) if index.format == "torch" else index), gpus)
    if as_json:
        options.print_json(layouts_dict(candidates, gpus))
    else:
        click.echo("\n".join(layout_lines(candidates, gpus)))
