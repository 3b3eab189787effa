"""``ckptguard verify``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptguard.cli import options
from ckptguard.core.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ckptguard.engine.sealed import Mode
    from ckptguard.engine.verify import Authority

_SEAL = re.compile(r"[0-9a-f]{64}")


@click.command(short_help="Check that a checkpoint is whole and unchanged.")
@options.path_argument()
@click.option("--quick", is_flag=True, help="Structure, sizes and fast block digests instead of BLAKE3.")
@click.option(
    "--against",
    metavar="SEAL|FILE",
    help="What was kept elsewhere: the seal, a copy of the manifest, or a file of `fingerprint -o`.",
)
@click.option(
    "--masters", is_flag=True, help="Also check that every weight is its fp32 master rounded (fully_reshardable)."
)
@options.step_option
@options.json_option
def verify(path: str, quick: bool, against: str | None, masters: bool, step: str | None, as_json: bool) -> int:
    """Check that a checkpoint is whole and its bytes are the ones that were sealed.

    Structure first: every element stored once, sizes right, nothing missing or extra, no pickle that runs code. Then the
    bytes against the manifest, or, where there is none, against the CRC-32 that torch stores beside each tensor. Every damage
    is placed: file, block, tensor, box, rank. Exits 4 if there is any.
    """
    from ckptguard.engine.verify import verify as check
    from ckptguard.report.progress import progress_bar

    mode: Mode = "quick" if quick else "full"
    with progress_bar() as progress:
        report = check(path, step=step, mode=mode, against=_authority(against), masters=masters, progress=progress)
    if as_json:
        options.print_json(
            {
                "location": report.location,
                "format": report.format,
                "damaged": report.damaged,
                "seal": report.seal,
                "proved": report.proved,
                "files": report.files,
                "bytes_checked": report.bytes_checked,
                "problems": [p.as_dict() for p in report.problems],
            }
        )
    else:
        from ckptguard.report import lines

        click.echo("\n".join(lines.of_report(report)))
    return int(ExitCode.DAMAGED if report.damaged else ExitCode.OK)


def _authority(text: str | None) -> Authority:
    """Reads what --against names; a kept file is told by its content."""
    from ckptguard.engine.verify import Authority
    from ckptguard.fingerprint import kept, manifest

    if text is None:
        return Authority()
    if _SEAL.fullmatch(text.lower()):
        return Authority(seal=text.lower())
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--against {text}: neither a seal (64 hexadecimal digits) nor a file")
    data = path.read_bytes()
    if data[:1] == b"{":
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--against {text}: not JSON ({error})") from error
        return Authority(fingerprints=kept.from_dict(value, text))
    return Authority(manifest=manifest.parse(data, text))
