"""``ckptguard view``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptguard.cli import options
from ckptguard.core.errors import ExitCode, NotFoundError, UsageError

if TYPE_CHECKING:
    from ckptguard.view.launching import Training
    from ckptguard.view.nodes import Nodes
    from ckptguard.view.preparing import Options

_AXES = (
    "tp", "pp", "ep", "etp", "vpp", "first_pp_layers", "last_pp_layers", "pp_layout", "count_embedding", "count_loss", "cp",
)  # fmt: skip
_seconds = click.FloatRange(min=0)


def _node_options[C: Callable[..., Any]](command: C) -> C:
    """Places, nodes, ranks and clocks: what ``prepare`` and ``status`` have in common."""
    count = click.IntRange(1)
    for option in reversed(
        (
            click.option(
                "--source", "sources", multiple=True, metavar="S",
                help="Another place to look for files: a shared path, or a URL (s3://bucket/run); may be given several times.",
            ),
            click.option(
                "--step", metavar="N",
                help="Which iteration (or `release`), and no other; by default the newest that can be whole everywhere.",
            ),
            options.axes_options,
            click.option(
                "--framework", type=click.Choice(["megatron-lm", "bridge", "torch"]),
                help="Who trains, where the launch line does not show it.",
            ),
            click.option("--nodes", type=count, help="Number of nodes, where neither the line nor variables say it."),
            click.option("--node-rank", type=click.IntRange(0), help="Which of them this is, from 0."),
            click.option(
                "--rdzv", metavar="HOST:PORT",
                help="Where the nodes meet: node 0's host and a port that is free there, another one than training's.",
            ),
            click.option("--ranks-per-node", type=count, help="Processes that training starts on every node."),
            click.option(
                "--ranks", metavar="RANKS", help="Ranks of every node, where they do not go in order: 0,2/1,3 for two nodes."
            ),
            click.option("--interface", metavar="NAME", help="Network interface by which other nodes reach this one."),
            click.option("--address", metavar="IP", help="This node's address there."),
            click.option(
                "--timeout", type=click.FloatRange(min=1), default=60.0, show_default=True, metavar="SECONDS",
                help="For all nodes to come; a node that falls silent later is given up after a third of it, at most 20 s.",
            ),
            click.option(
                "--wait", type=_seconds, default=10.0, show_default=True, metavar="SECONDS",
                help="For files that a network file system does not show yet.",
            ),
        )
    ):  # fmt: skip
        command = option(command)
    return command


_line_argument = click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="[-- LAUNCH LINE...]")


@click.group(short_help="Before resuming: one checkpoint view that every node agrees on.")
def view() -> None:
    """Give every node, under one path, the files that its ranks will read: all of one save, all verified.

    Ranks that resume from node-local disks wait for files that only other nodes have, until a time-out. Run `prepare` once per
    node before training starts, and have training load the view.
    """


@view.command(short_help="Agree on a step, bring each node what it lacks, publish.")
@click.argument("ckpt_dir", metavar="CKPT_DIR")
@_line_argument
@click.option(
    "--view", "path", required=True, type=click.Path(path_type=Path), help="Where the view appears, on every node."
)
@_node_options
@options.threads_option
@click.option(
    "--allow-none",
    is_flag=True,
    help="That no node has any checkpoint is no error: training starts anew, without a view.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be chosen and moved; move nothing but the index.")
@options.json_option
def prepare(ckpt_dir: str, line: tuple[str, ...], **chosen: Any) -> int:
    """Make the newest step that can be whole on every node appear at --view, verified, on all nodes or on none.

    Start it once per node (srun --ntasks-per-node=1). With a launch line it becomes that line once the view is there, with the
    flag that loads from it: ckptguard view prepare /local/ckpt --view /local/view -- torchrun ... pretrain_gpt.py ...
    """
    from ckptguard.report.progress import progress_bar
    from ckptguard.report.views import notes_lines, prepared_lines, result_dict
    from ckptguard.view.launching import launch_of, run, training_of
    from ckptguard.view.preparing import prepare as prepare_view

    environment, as_json = dict(os.environ), chosen["as_json"]
    training = training_of(line, chosen["framework"])
    asked = _asked(ckpt_dir, training, chosen)
    _say_nodes(asked.nodes, as_json=as_json)
    try:
        with progress_bar(wanted=not as_json) as progress:
            result = prepare_view(asked, progress)
    except NotFoundError as error:
        if not chosen["allow_none"]:
            raise
        _refuse_old_view(chosen["path"])
        return _first_start(error.message, training, environment, as_json=as_json)
    if as_json:
        options.print_json(result_dict(result, asked.nodes))
    else:
        _say(prepared_lines(result, asked.nodes))
    if training is None or result.view is None or result.agreement is None:
        return ExitCode.OK
    launch = launch_of(training, result.view, result.agreement.step)
    _say(notes_lines(launch.notes))
    if not as_json and launch.added:
        _say([f"  starting your line {shlex.join(('+', *launch.added))}"])
    return run(launch.words, environment)


def _refuse_old_view(path: Path) -> None:
    """Training that is told to load from the view would go on from what an earlier run left there."""
    from ckptguard.view.publishing import Site

    if (current := Site(path).current()) is not None:
        raise UsageError(
            f"{path}: no node has a checkpoint, and this view holds one of an earlier run ({current.name})",
            next_step="If training is to start anew, remove that link on every node.",
        )


def _first_start(why: str, training: Training | None, environment: dict[str, str], *, as_json: bool) -> int:
    """There is nothing to resume from, and the user has said that this is no error: the line is run as it is."""
    from ckptguard.view.launching import run

    if as_json:
        options.print_json({"agreement": None, "view": None, "notes": [why]})
    else:
        _say([f"{why}: training starts anew"])
    return ExitCode.OK if training is None else run(training.line.words, environment)


@view.command(short_help="What each node has, and which step could be whole; changes nothing.")
@click.argument("ckpt_dir", metavar="CKPT_DIR")
@_line_argument
@click.option(
    "--view", "path", type=click.Path(path_type=Path), help="Also tell which versions of the view this node has."
)
@_node_options
@options.json_option
def status(ckpt_dir: str, line: tuple[str, ...], **chosen: Any) -> int:
    """Look at what each node has, as `prepare` does first, and tell what it would choose. Nothing is written.

    Start it once per node; with --nodes 1 it looks at this node alone. Exit code 4: no step can be made whole.
    """
    from ckptguard.report.views import best_of, result_dict, status_lines, view_dict
    from ckptguard.view.launching import training_of
    from ckptguard.view.preparing import status as look
    from ckptguard.view.pruning import views

    asked = _asked(ckpt_dir, training_of(line, chosen["framework"]), {**chosen, "threads": None, "dry_run": True})
    there = views(chosen["path"]) if chosen["path"] is not None else ()
    _say_nodes(replace(asked.nodes, notes=()), as_json=chosen["as_json"])  # they are about what would be brought
    result = look(asked)
    if chosen["as_json"]:
        options.print_json(result_dict(result, asked.nodes) | {"versions": [view_dict(one) for one in there]})
    else:
        click.echo("\n".join(status_lines(result, asked.nodes, there)))
    return ExitCode.OK if asked.nodes.number or best_of(result.candidates) else ExitCode.DAMAGED


@view.command(short_help="Remove old versions of a view from this node.")
@click.option("--view", "path", required=True, type=click.Path(path_type=Path), help="The view.")
@click.option(
    "--keep", type=click.IntRange(1), default=1, show_default=True, help="Versions that stay; one is the current."
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@options.json_option
def prune(path: Path, keep: int, dry_run: bool, as_json: bool) -> int:
    """Remove old versions of a view, and what prepares that were broken off left, from this node. The current one stays."""
    from ckptguard.report.views import pruned_lines, view_dict
    from ckptguard.view.pruning import prune as remove

    removed = remove(path, keep, dry_run=dry_run)
    if as_json:
        options.print_json({"removed": [view_dict(one) for one in removed], "dry_run": dry_run})
    else:
        click.echo("\n".join(pruned_lines(removed, dry_run=dry_run)))
    return ExitCode.OK


def _asked(ckpt_dir: str, training: Training | None, chosen: Mapping[str, Any]) -> Options:
    """What this node is asked to do.

    Raises:
        UsageError: Options, launch line and variables contradict each other, or do not say enough.
    """
    from ckptguard.megatron.run_layout import layout_said
    from ckptguard.view.nodes import Given, here
    from ckptguard.view.preparing import Options

    line = training.line if training else None
    given = Given(
        number=chosen["node_rank"], count=chosen["nodes"], meeting=chosen["rdzv"], ranks_each=chosen["ranks_per_node"],
        ranks=chosen["ranks"], interface=chosen["interface"], address=chosen["address"],
    )  # fmt: skip
    axes = {name: chosen[name] for name in _AXES if chosen[name] not in (None, False)}
    said = layout_said(axes, line, training.framework if training else None)
    nodes = here(given, line, os.environ, timeout_seconds=chosen["timeout"])
    if said.unknown:
        nodes = nodes.without_ranks(f"the layout is not known: {said.unknown}")
    return Options(
        places=(ckpt_dir, *chosen["sources"]), nodes=nodes, view=chosen["path"], step=_step(chosen["step"], training),
        layout=said.layout, timeout_seconds=chosen["timeout"], wait_seconds=chosen["wait"], threads=chosen["threads"],
        dry_run=chosen["dry_run"],
    )  # fmt: skip


def _step(given: str | None, training: Training | None) -> str | None:
    """The step that is wanted: what was given, or what the launch line asks for."""
    from ckptguard.view.survey import number_of

    wanted = None if given is None else number_of(given)
    of_line = str(training.step) if training is not None and training.step else None
    if wanted is not None and of_line is not None and wanted != of_line:
        raise UsageError(
            f"--step is {wanted}, and the launch line asks for step {of_line}", next_step="Leave one of them out."
        )
    return wanted or of_line


def _say_nodes(nodes: Nodes, *, as_json: bool) -> None:
    from ckptguard.report.views import nodes_line, notes_lines

    if not as_json and nodes.count > 1:
        _say([nodes_line(nodes), *(notes_lines(nodes.notes) if not nodes.number else ())])


def _say(lines: Any) -> None:
    """To standard error: standard output is the launch line's."""
    for text in lines:
        click.echo(text, err=True)
