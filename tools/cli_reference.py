"""Writes docs/cli.md from the commands themselves; ``--check`` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ckptguard.cli.main import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"


def page() -> str:
    """The whole page."""
    parts = [
        "# Commands",
        "",
        "Made from the commands by `tools/cli_reference.py`; the tests check that it is up to date.",
        "",
    ]
    context = click.Context(
        cli, info_name="ckptguard", help_option_names=["-h", "--help"], max_content_width=100, terminal_width=100
    )
    parts += ["```text", cli.get_help(context), "```", ""]
    for name, command in sorted(cli.commands.items()):
        parts += _section(name, command, context)
    return "\n".join(parts)


def _section(name: str, command: click.Command, above: click.Context) -> list[str]:
    """A command's help; under a group, that of its commands too."""
    context = click.Context(command, info_name=name, parent=above, max_content_width=100, terminal_width=100)
    parts = [f"## {context.command_path}", "", "```text", command.get_help(context), "```", ""]
    if isinstance(command, click.Group):
        for inner, one in sorted(command.commands.items()):
            parts += _section(inner, one, context)
    return parts


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PAGE.read_text() == page() else f"{PAGE.name} is out of date: run tools/cli_reference.py")
    PAGE.write_text(page())
