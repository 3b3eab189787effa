"""``ckptguard doctor``."""

from __future__ import annotations

import click

from ckptguard.cli import options
from ckptguard.core.errors import ExitCode


@click.command(short_help="What is installed, and what is stood in for.")
@options.json_option
def doctor(as_json: bool) -> int:
    """Say what this machine has of the packages that Megatron models are built with.

    Where an optional one is missing, a small stand-in takes its place, only inside the process that asks Megatron about a
    model's structure: it has the same parameters and computes nothing. Exits 6 if something needed is missing.
    """
    from ckptguard.engine.workers import default_threads
    from ckptguard.fingerprint import native
    from ckptguard.megatron.surroundings import packages

    found = packages()
    compiled = native.library() is not None
    if as_json:
        options.print_json(
            {
                "packages": [
                    {"name": p.name, "version": p.version, "stand_in": p.stand_in, "missing": p.missing} for p in found
                ],
                "compiled_fingerprints": compiled,
                "threads": default_threads(),
            }
        )
    else:
        for package in found:
            state = package.version or (f"stood in for: {package.stand_in}" if package.stand_in else package.missing)
            colour = "green" if package.version else "yellow" if package.stand_in else "red"
            click.echo(f"  {package.name:<24} {click.style(state, fg=colour)}")
        speed = (
            "compiled"
            if compiled
            else "numba: starts more slowly; a C compiler at install time gives the compiled ones"
        )
        click.echo(f"  {'fingerprints':<24} {speed}")
        click.echo(f"  {'threads':<24} {default_threads()}")
    return int(ExitCode.ENVIRONMENT if any(package.missing for package in found) else ExitCode.OK)
