"""``ckptguard inspect``."""

from __future__ import annotations

import click

from ckptguard.cli import options
from ckptguard.cli.megatron_names import named, names_option


@click.command(short_help="Show what is in a checkpoint.")
@options.path_argument()
@options.step_option
@options.tensors_option
@names_option
@options.json_option
def inspect(path: str, step: str | None, globs: tuple[str, ...], names: str, as_json: bool) -> int:
    """Show what is in a checkpoint, without reading its tensor data.

    PATH is an iteration directory, a root with a tracker, a Hugging Face snapshot or a hub id (org/name[@revision]).
    """
    from ckptguard.engine.summary import summarise
    from ckptguard.formats.registry import open_checkpoint

    with open_checkpoint(path, step=step) as checkpoint:
        index = (named(checkpoint, names) if names == "global" else checkpoint).index  # auto: as it is stored
        options.refuse_no_match(index.tensors, globs)
        chosen = [e for n, e in index.tensors.items() if globs and options.matcher(globs)(n)]
        summary = summarise(index)
    if as_json:
        value = summary.as_dict()
        if globs:
            value["chosen"] = [
                {
                    "name": e.name,
                    "dtype": e.dtype.name,
                    "shape": list(e.shape),
                    "chunks": [
                        {
                            "offset": list(c.box.offset),
                            "size": list(c.box.size),
                            "file": c.span.file,
                            "offset_bytes": c.span.offset_bytes,
                            "length_bytes": c.span.length_bytes,
                        }
                        for c in e.chunks
                    ],
                }
                for e in chosen
            ]
        options.print_json(value)
        return 0
    from ckptguard.report import tables

    out = tables.console()
    if globs:
        tables.print_tensors(chosen, out)
    else:
        tables.print_summary(summary, out)
    return 0
