"""``ckptguard fingerprint``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ckptguard.cli import options
from ckptguard.cli.megatron_names import named, names_option


@click.command(short_help="Digest the content of every tensor.")
@options.path_argument()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write them to a file, for `verify --against`.",
)
@options.step_option
@options.tensors_option
@names_option
@options.threads_option
@options.json_option
def fingerprint(
    path: str,
    output: Path | None,
    step: str | None,
    globs: tuple[str, ...],
    names: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Digest the content of every tensor, independent of layout and format.

    The same state has the same fingerprints under any TP, PP, EP or DP, in every format that keeps names and dtypes. One root
    stands for all tensors, one for the weights alone.
    """
    from ckptguard.engine.fingerprints import fingerprint_checkpoint
    from ckptguard.fingerprint.kept import as_dict, roots_of
    from ckptguard.fingerprint.values import ALGORITHM
    from ckptguard.formats.facts import kind_of_name
    from ckptguard.formats.registry import open_checkpoint
    from ckptguard.formats.storage import write_atomically
    from ckptguard.report.progress import progress_bar

    with open_checkpoint(path, step=step) as opened, progress_bar() as progress:
        checkpoint = named(opened, names)
        options.refuse_no_match(checkpoint.index.tensors, globs)
        matches = options.matcher(globs)
        prints = fingerprint_checkpoint(checkpoint, keep=lambda e: matches(e.name), threads=threads, progress=progress)
        location = checkpoint.index.location
    roots = roots_of(prints, kind_of_name)
    value = as_dict(prints, roots, location)
    if output is not None:
        write_atomically(output, json.dumps(value, indent=1).encode() + b"\n")
    if as_json:
        options.print_json(value)
        return 0
    # One line a tensor, as of sha256sum: made for grep and diff, and at once there for a hundred thousand tensors.
    lines = [f"{f.hex}  {f.dtype}[{','.join(map(str, f.shape))}]  {name}" for name, f in prints.items()]
    lines += [f"{kind} root {value}" for kind, value in roots.items()]
    click.echo("\n".join([*lines, f"algorithm {ALGORITHM}"]))
    return 0
