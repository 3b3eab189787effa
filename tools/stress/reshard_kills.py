"""Reshardings that are killed with SIGKILL at random instants: nothing may look whole that is not, and a rerun ends the same.

Two kinds of trials. In the first, as in ``import_kills``, a planned resharding is forked and killed: by the clock, or before,
after or in the middle of a random system call that changes the disk, those of the commit among them. In the second the whole
command is killed, with the process that asks Megatron: while it plans, writes and proves, or during the commit. Each trial
looks at what was left, with ckptguard's and with Megatron's own eyes, starts the same again, and compares every byte of target
and source. Exits 1 on any miss, and if no kill hit the writing, the proof or the commit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import import_kills
import make_megatron
from import_kills import TOOL, Case, Megatron, after_rerun, digests, false_claims, record
from make_snapshots import size_in_bytes

from ckptguard.convert.reshard_prepare import prepare_reshard
from ckptguard.convert.resharding import ReshardOptions, run_reshard
from ckptguard.engine.write_journal import NAME, entries, finished
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout

OPTIONS = ReshardOptions(layout=Layout(tp=4), old_readers=True)
FLAGS = ("--tp=4", "--pp=1")
_WAIT_SECONDS = 300.0
_POLL_SECONDS = 0.001


class ReshardCase(Case):
    """One planned resharding, which trials start again and again."""

    def start(self, arrange: Callable[[], None] = lambda: None) -> int:
        """Forks a process that reshards; it ends with the exit code, and its message stands in ``message``.

        Args:
            arrange: Called in it first.
        """

        def reshard() -> None:
            arrange()
            run_reshard(self.prepared, self.dst, OPTIONS, what="reshard of a trial")
            os._exit(0)  # in place of the import, which the forked process would go on with

        return super().start(reshard)

    @property
    def command(self) -> list[str]:
        """The command line of the same resharding."""
        return [*TOOL, "reshard", str(self.source), str(self.dst), *FLAGS]

    def stage(self) -> tuple[str, list[str]]:
        """As ``false_claims``, and whether all files were written, so that the proof was under way."""
        stage, wrong = false_claims(self)
        if stage.startswith("file "):
            lines = [line for path in self.partials[0].glob(f"{NAME}*") for line in entries(path)]
            written = {file.path for file in self.prepared.write_plan.files} <= finished(lines).keys()
            stage = "proving" if written else stage
        return stage, wrong


def source_in(folder: Path, options: argparse.Namespace) -> Path:
    """The source of all trials, a copy: made, or the one that was named."""
    if options.source is not None:
        return Path(shutil.copytree(options.source, folder / "source"))
    return make_megatron.make(folder / "source", options.size, layout=Layout(tp=2, pp=2))


@contextlib.contextmanager
def planned(source: Path, dst: Path) -> Iterator[ReshardCase]:
    """Plans a resharding, and runs it once undisturbed.

    Args:
        source: A checkpoint, in a folder in which trials may leave notes.
        dst: The target.
    """
    folder = source.parent
    with open_checkpoint(source) as checkpoint, Megatron() as megatron:
        prepared = prepare_reshard(checkpoint, OPTIONS)
        case = ReshardCase(source, dst, checkpoint, prepared, digests(source), megatron)
        start = time.perf_counter()
        code = case.run(lambda: record(folder / "calls"))
        case.seconds = time.perf_counter() - start
        if code:
            sys.exit(f"the undisturbed resharding failed: {case.message.read_text()}")
        case.calls = (folder / "calls").read_text().split()
        case.expected = digests(dst)
        case.clear()
        yield case


@dataclass(frozen=True, slots=True)
class Times:
    """When the parts of an undisturbed command begin and end, in seconds from its start."""

    begun: float
    last_files: float
    end: float


class Command:
    """The command, running. Leaving it kills it and what it started."""

    def __init__(self, case: ReshardCase) -> None:
        self.case = case
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            case.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> int:
        """Kills it, with the process that asks Megatron; its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def until(self, seen: Callable[[], bool]) -> float:
        """Waits until something is to be seen or the command has ended; seconds from its start."""
        while not seen() and self.process.poll() is None:
            time.sleep(_POLL_SECONDS)
        return time.perf_counter() - self.started

    def writes(self) -> bool:
        """Whether the staging directory is there."""
        return bool(self.case.partials)

    def commits(self) -> bool:
        """Whether the first of the small last files is there."""
        folder = self.case.prepared.folder
        with contextlib.suppress(FileNotFoundError):
            return any(p.suffix != ".distcp" for partial in self.case.partials for p in (partial / folder).iterdir())
        return False


def undisturbed(case: ReshardCase, misses: list[str]) -> Times:
    """Runs the command once; its target must be whole at the instant at which it appears."""
    with Command(case) as command:
        begun = command.until(command.writes)
        last = command.until(lambda: command.commits() or case.dst.exists())
        command.until(case.dst.exists)
        if digests(case.dst) != case.expected:
            misses.append("command: the target is not whole when it appears, or not what the forked run wrote")
        end = command.until(lambda: False)
        code = command.process.wait()
    misses += [f"command, undisturbed: {text}" for text in after_rerun(case, code)]
    case.clear()
    return Times(begun, last, end)


def killed(case: ReshardCase, kind: str, times: Times, rng: random.Random) -> int:
    """Starts the command and kills it; its exit code, -9 unless it had ended before."""
    with Command(case) as command:
        if kind == "planning":
            time.sleep(rng.uniform(0, times.begun))
        elif kind == "work":
            command.until(command.writes)
            time.sleep(rng.uniform(0, times.end - times.begun))
        else:
            command.until(command.commits)
            time.sleep(rng.uniform(0, times.end - times.last_files))
        return command.kill()


def command_trials(case: ReshardCase, count: int, rng: random.Random, misses: list[str]) -> Counter[str]:
    """Kills of the whole command: one in ten while it plans, two while it commits, the others in between."""
    counts: Counter[str] = Counter()
    times = undisturbed(case, misses)
    for number in range(count):
        kind = "planning" if number % 10 == 9 else "commit" if number % 5 == 1 else "work"
        code = killed(case, kind, times, rng)
        stage, wrong = (
            case.stage() if code == -signal.SIGKILL or code == 0 else ("error", [f"ended with {code} by itself"])
        )
        counts[f"command: {stage}"] += 1
        if stage == "done":
            wrong += after_rerun(case, 0)
        else:
            done = subprocess.run(case.command, check=False, capture_output=True, text=True, timeout=_WAIT_SECONDS)
            case.message.write_text(done.stderr)
            wrong += after_rerun(case, done.returncode)
        misses += [f"command, {stage}: {text}" for text in wrong]
        case.clear()
        print(
            f"\r{number + 1} of {count} kills of the command, {len(misses)} misses", end="", file=sys.stderr, flush=True
        )
    print(file=sys.stderr)
    return counts


def main() -> None:
    """Runs the trials and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50, help="kills of a planned resharding")
    parser.add_argument("--commands", type=int, default=50, help="kills of the whole command")
    parser.add_argument("--size", type=size_in_bytes, default=256 << 20, help="of the checkpoint (256MiB)")
    parser.add_argument("--source", type=Path, help="another checkpoint, which TP4 PP1 fits")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, misses, start = random.Random(options.seed), [], time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as scratch,
        planned(source_in(Path(scratch), options), Path(scratch) / "dst") as case,
    ):
        counts = import_kills.trials(case, options.trials, rng, misses)
        if options.trials >= 20:
            misses += import_kills.unhit(counts)
        if options.commands:
            found = command_trials(case, options.commands, rng, misses)
            if options.commands >= 20 and not found["command: proving"]:
                misses.append("no kill of a command hit the proof")
            counts += found
    print(f"{options.trials + options.commands} kills in {time.perf_counter() - start:.0f} s:", json.dumps(counts))
    print(f"{len(misses)} misses", *misses[:20], sep="\n  ")
    sys.exit(bool(misses))


if __name__ == "__main__":
    main()
