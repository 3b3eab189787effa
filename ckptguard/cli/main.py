"""The ``ckptguard`` command: the group, and how errors become exit codes."""

from __future__ import annotations

import json
import sys
import traceback

import click

from ckptguard import __version__
from ckptguard.cli.completion import completion
from ckptguard.cli.diff import diff
from ckptguard.cli.doctor import doctor
from ckptguard.cli.export import export
from ckptguard.cli.fingerprint import fingerprint
from ckptguard.cli.import_ import import_
from ckptguard.cli.inspect import inspect
from ckptguard.cli.reshard import reshard
from ckptguard.cli.seal import seal
from ckptguard.cli.verify import verify
from ckptguard.cli.verify_resume import verify_resume
from ckptguard.cli.view import view
from ckptguard.core.errors import CkptguardError, ExitCode

_EPILOG = (
    "Exit codes: 0 done and proved, 2 usage, 3 different, 4 damaged, 5 not supported, 6 environment, 130 interrupted."
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=_EPILOG,
)
@click.version_option(__version__, "-V", "--version")
def cli() -> None:
    """Checkpoint integrity and resharding for Megatron: nothing lost, nothing silent, bounded memory."""


for _command in (
    import_, export, reshard, inspect, fingerprint, seal, verify, diff, verify_resume, view, doctor, completion
):  # fmt: skip
    cli.add_command(_command)


def main() -> None:
    """Runs the command line and exits with the code that docs/exit-codes.md gives."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit code. Bugs print a traceback, everything else one clear message."""
    try:
        result = cli.main(arguments, prog_name="ckptguard", standalone_mode=False)
        sys.stdout.flush()
        return int(result or 0)
    except click.ClickException as error:
        error.show()
        return int(ExitCode.USAGE)
    except CkptguardError as error:
        _show(error, as_json="--json" in arguments)
        return int(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; Python would complain while it flushes at exit
        return int(ExitCode.OK)
    except Exception:  # noqa: BLE001 - the last resort: shown in full, never swallowed
        traceback.print_exc()
        click.echo("This is a bug in ckptguard: please report the lines above.", err=True)
        raise SystemExit(int(ExitCode.BUG)) from None


def _show(error: CkptguardError, *, as_json: bool) -> None:
    from ckptguard.report import lines

    if as_json:
        click.echo(json.dumps(lines.error_dict(error), indent=2))
    click.echo("\n".join(lines.of_error(error)), err=True)
