"""``ckptguard completion``: the script that a shell sources."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the completion script of a shell: eval "$(ckptguard completion bash)"."""
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "ckptguard", "_CKPTGUARD_COMPLETE").source())
    return 0
