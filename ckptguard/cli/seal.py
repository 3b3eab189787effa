"""``ckptguard seal``."""

from __future__ import annotations

from pathlib import Path

import click

from ckptguard.cli import options


@click.command(short_help="Write the manifest that verify compares bytes with.")
@options.path_argument()
@click.option("--replace", is_flag=True, help="Write even if the checkpoint is sealed already.")
@click.option(
    "--fingerprints/--no-fingerprints", default=True, help="Also record every tensor's fingerprint (default: yes)."
)
@click.option("--crc/--no-crc", default=True, help="First check the CRC-32 beside each tensor (default: yes).")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Also keep a copy of the manifest there."
)
@options.step_option
@options.json_option
def seal(
    path: str, replace: bool, fingerprints: bool, crc: bool, output: Path | None, step: str | None, as_json: bool
) -> int:
    """Write the manifest (ckptguard.json.zst) that `verify` compares bytes with.

    The checkpoint is checked first; a damaged one is not sealed. The seal that is printed stands for every byte: keep it
    somewhere else and give it to `verify --against`.
    """
    from ckptguard.engine.seal import seal as write_seal
    from ckptguard.formats.registry import open_checkpoint
    from ckptguard.report import units
    from ckptguard.report.progress import progress_bar

    with open_checkpoint(path, step=step) as checkpoint, progress_bar() as progress:
        manifest = write_seal(
            checkpoint, fingerprints=fingerprints, crc=crc, replace=replace, copy_to=output, progress=progress
        )
        location = checkpoint.index.location
    total = sum(f.size_bytes for f in manifest.files.values())
    if as_json:
        options.print_json(
            {
                "location": location,
                "seal": manifest.seal,
                "root": manifest.root,
                "files": len(manifest.files),
                "bytes": total,
            }
        )
    else:
        click.echo(f"sealed {len(manifest.files)} files, {units.size(total)}")
        click.echo(f"seal {manifest.seal}")
        if manifest.root:
            click.echo(f"root {manifest.root}")
    return 0
