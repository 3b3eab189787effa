"""Imports that are killed with SIGKILL at random instants: nothing may look whole that is not, and a rerun must end the same.

Each trial forks a planned import, kills it, looks at what it left (with ckptguard's and with Megatron's own eyes), starts
it again, sometimes kills that one too, and compares every byte of the result with an undisturbed import's. Three ways to
choose the instant: by the clock, uniformly over an undisturbed run; before, after or in the middle of a random system
call that changes the disk; the same among the calls of the commit, which are few and soon over. A few trials kill the whole
command instead, planning included. Exits 1 on any miss, and if no kill hit the writing or the commit.
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from ckptguard.convert import importing
from ckptguard.core.errors import CkptguardError
from ckptguard.engine.verify import verify
from ckptguard.fingerprint.manifest import FILE_NAME, parse
from ckptguard.formats.base import Checkpoint
from ckptguard.formats.registry import open_checkpoint
from ckptguard.layout.layouts import Layout

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import make_snapshots

TOOL = [str(Path(sys.executable).parent / "ckptguard")]
LAYOUT = Layout(tp=2, pp=2)
CHANGING = ("open", "mkdir", "pwrite", "write", "fsync", "ftruncate", "unlink", "rename")
"""Functions of ``os`` through which a run changes the disk."""
_WAIT_SECONDS = 120.0
_MEGATRON = """
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
for line in sys.stdin:
    try:
        found = check_is_distributed_checkpoint(line.rstrip("\\n"))
    except ValueError:  # metadata.json that was cut
        found = False
    print("yes" if found else "no", file=answers, flush=True)
"""


def digests(path: Path) -> dict[str, str]:
    """BLAKE3 of every file below a directory; of a manifest, of all that it says but the time."""
    out = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        data = file.read_bytes()
        if file.name == FILE_NAME:
            data = replace(parse(data, str(file)), created="").seal.encode()
        out[file.relative_to(path).as_posix()] = blake3(data).hexdigest()
    return out


class Megatron:
    """Megatron's own check, in a process of its own: this one forks, and what Megatron imports starts threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MEGATRON],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Megatron:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()

    def accepts(self, folder: Path) -> bool:
        """Whether it takes a directory for a distributed checkpoint."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(folder, file=self._process.stdin, flush=True)
        return {"yes\n": True, "no\n": False}[self._process.stdout.readline()]


@dataclass
class Case:
    """One planned import, which trials start again and again.

    Attributes:
        source: The snapshot.
        dst: The target of all trials.
        checkpoint: The snapshot, open.
        prepared: The plan.
        source_digests: Of the snapshot's files.
        expected: Of an undisturbed import's files.
        megatron: Its view of what is left.
        calls: Names of the calls with which that one changed the disk, in order.
        seconds: How long it took.
    """

    source: Path
    dst: Path
    checkpoint: Checkpoint
    prepared: importing.Prepared
    source_digests: dict[str, str]
    megatron: Megatron
    expected: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def options(self) -> importing.ImportOptions:
        """As given to ``prepare``."""
        return importing.ImportOptions(layout=LAYOUT)

    @property
    def commit(self) -> int:
        """Number of the first call after the last file was noted in the journal."""
        return len(self.calls) - self.calls[::-1].index("write")

    @property
    def partials(self) -> list[Path]:
        """Staging directories beside the target."""
        return sorted(self.dst.parent.glob(f"{self.dst.name}.partial-*"))

    def clear(self) -> None:
        """Removes the target and what stands beside it."""
        for path in (self.dst, *self.partials):
            shutil.rmtree(path, ignore_errors=True)

    def start(self, arrange: Callable[[], None] = lambda: None) -> int:
        """Forks a process that imports; it ends with the exit code, and its message stands in ``message``.

        Args:
            arrange: Called in it first.
        """
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            arrange()
            importing.run_import(self.checkpoint, self.prepared, self.dst, self.options, what="import of a trial")
            code = 0
        except CkptguardError as error:
            self.message.write_text(str(error))
            code = int(error.exit_code)
        except BaseException as error:  # noqa: BLE001 -- told to the parent, which counts it as a miss
            self.message.write_text(repr(error))
        finally:
            os._exit(code)

    @property
    def message(self) -> Path:
        """Where a forked import says why it failed."""
        return self.source.parent / "message"

    def run(self, arrange: Callable[[], None] = lambda: None) -> int:
        """Imports in a forked process and waits for it; its exit code, negative if a signal ended it."""
        return ended(self.start(arrange))


def ended(pid: int) -> int:
    """Waits for a child; its exit code, or minus the signal. One that does not end is killed, and an error."""
    until = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"an import did not end within {_WAIT_SECONDS:g} s")


def record(into: Path) -> None:
    """Has the calls that change the disk noted in a file, a line each. For a child."""
    handle, lock, write = os.open(into, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), threading.Lock(), os.write

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _changes(name, args):
                with lock:
                    write(handle, f"{name}\n".encode())
            return real(*args, **kwargs)

        return call

    for name in CHANGING:
        setattr(os, name, noted(name, getattr(os, name)))


def trip(number: int, how: str, share: float) -> None:
    """Has the process die at the call of that number. For a child.

    Args:
        number: Of the call, counted as ``record`` does.
        how: ``before``, ``after`` or ``inside``: when a part of the bytes is written.
        share: Which part.
    """
    lock, count = threading.Lock(), 0

    def armed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if not _changes(name, args):
                return real(*args, **kwargs)
            with lock:
                mine, count = count == number, count + 1
            if mine and how == "inside" and name in ("pwrite", "write"):
                handle, data, *rest = args
                real(handle, data[: int(len(data) * share)], *rest)
            if mine and how != "after":
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if mine:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name in CHANGING:
        setattr(os, name, armed(name, getattr(os, name)))


def _changes(name: str, args: tuple[Any, ...]) -> bool:
    return name != "open" or bool(args[1] & os.O_CREAT)


@contextlib.contextmanager
def planned(folder: Path, size_bytes: int, dst: Path) -> Iterator[Case]:
    """Makes a snapshot, plans its import, and runs it once undisturbed.

    Args:
        folder: For the snapshot.
        size_bytes: Of the snapshot, about.
        dst: The target.
    """
    source = make_snapshots.make(folder / "snapshot", size_bytes, shard_bytes=max(size_bytes // 3, 1 << 20))
    options = importing.ImportOptions(layout=LAYOUT)
    with open_checkpoint(source) as checkpoint, Megatron() as megatron:
        prepared = importing.prepare(checkpoint, "a/model", options)
        case = Case(source, dst, checkpoint, prepared, digests(source), megatron)
        start = time.perf_counter()
        code = case.run(lambda: record(folder / "calls"))
        case.seconds = time.perf_counter() - start
        if code:
            sys.exit(f"the undisturbed import failed: {case.message.read_text()}")
        case.calls = (folder / "calls").read_text().split()
        case.expected = digests(dst)
        case.clear()
        yield case


def false_claims(case: Case) -> tuple[str, list[str]]:
    """How far a broken-off import had come, and everything about what it left that claims more.

    Returns:
        The stage; sentences, none if all is well.
    """
    if case.dst.exists():
        wrong = [] if digests(case.dst) == case.expected else ["the target is there, but not whole"]
        return "done", wrong + ["the target and a staging directory are there"] * bool(case.partials)
    if not case.partials:
        return "nothing there", []
    (partial,) = case.partials
    folder = partial / case.prepared.folder
    looks = _damage(folder)
    if case.megatron.accepts(folder):
        return "all but the name", [] if looks is None else [f"metadata.json is there, but verify says {looks}"]
    wrong = [f"{path}: verify finds nothing wrong" for path in (folder, partial) if _damage(path) is None]
    if folder.exists() and any(path.suffix != ".distcp" for path in folder.iterdir()):
        return "committing", wrong
    count = sum(path.suffix == ".distcp" for path in folder.glob("*")) if folder.exists() else 0
    return f"file {count}" if count else "before the first file", wrong


def _damage(path: Path) -> str | None:
    """What ckptguard finds wrong with a directory, or None."""
    try:
        report = verify(path)
    except CkptguardError as error:
        return str(error)
    return "; ".join(str(problem) for problem in report.problems if problem.is_damage) or None


def after_rerun(case: Case, code: int) -> list[str]:
    """What is wrong after the run that was to end well."""
    if code:
        return [f"the rerun ended with {code}: {case.message.read_text() if case.message.exists() else ''}"]
    found = digests(case.dst)
    names = sorted(name for name in found.keys() | case.expected.keys() if found.get(name) != case.expected.get(name))
    wrong = [f"not the undisturbed import's bytes: {', '.join(names)}"] if names else []
    wrong += ["a staging directory is left"] * bool(case.partials)
    return wrong + ["the source changed"] * (digests(case.source) != case.source_digests)


def killed(case: Case, kind: str, rng: random.Random) -> int:
    """Starts an import and kills it; its exit code, -9 unless it had ended before."""
    if kind == "clock":
        delay = rng.uniform(0, case.seconds)
        pid = case.start()
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        return ended(pid)
    first, last = (case.commit, len(case.calls)) if kind == "commit" else (0, case.commit)
    number, how, share = rng.randrange(first, last), rng.choice(("before", "after", "inside")), rng.random()
    return case.run(lambda: trip(number, how, share))


def killed_command(case: Case, seconds: float, rng: random.Random) -> int:
    """As ``killed``, but of the whole command, planning included."""
    process = subprocess.Popen(
        command(case), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(0, seconds))
    process.kill()
    code = process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the process that asks Megatron
    return code


def command(case: Case) -> list[str]:
    """The command line of the same import."""
    sizes = [f"--tp={LAYOUT.tp}", f"--pp={LAYOUT.pp}"]
    return [*TOOL, "import", str(case.source), str(case.dst), *sizes]


def trials(case: Case, count: int, rng: random.Random, misses: list[str]) -> Counter[str]:
    """Runs trials until that many kills have hit a running import."""
    counts: Counter[str] = Counter()
    hits = 0
    while hits < count:
        kind = rng.choice(("clock", "clock", "write", "commit"))
        code = killed(case, kind, rng)
        if code != -signal.SIGKILL:
            counts["ended before the kill"] += 1
            if code:
                misses.append(f"{kind}: ended with {code} by itself")
            case.clear()
            continue
        hits += 1
        stage, wrong = false_claims(case)
        counts[stage] += 1
        if stage != "done":
            if rng.random() < 0.3 and killed(case, "clock", rng) == -signal.SIGKILL:
                counts["rerun killed too"] += 1
                wrong += false_claims(case)[1]
            if not case.dst.exists():
                wrong += after_rerun(case, case.run())
        misses += [f"{kind}, {stage}: {text}" for text in wrong]
        case.clear()
        print(f"\r{hits} of {count} kills, {len(misses)} misses", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return counts


def command_trials(case: Case, count: int, rng: random.Random, misses: list[str]) -> Counter[str]:
    """The same with the whole command; its identity differs, for it stores another name of the model."""
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    subprocess.run(command(case), check=True, capture_output=True, timeout=_WAIT_SECONDS)
    seconds = time.perf_counter() - start
    named = replace(case, expected=digests(case.dst))
    case.clear()
    for number in range(count):
        killed_command(named, seconds, rng)
        stage, wrong = false_claims(named)
        counts[f"command: {stage}"] += 1
        if stage != "done":
            done = subprocess.run(command(named), check=False, capture_output=True, text=True, timeout=_WAIT_SECONDS)
            case.message.write_text(done.stderr)
            wrong += after_rerun(named, done.returncode)
        misses += [f"command, {stage}: {text}" for text in wrong]
        case.clear()
        print(f"\r{number + 1} of {count} kills of the command", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return counts


def unhit(counts: Mapping[str, int]) -> list[str]:
    """A run of trials that never hit the writing or the commit has shown nothing."""
    files = sum(n for stage, n in counts.items() if stage.startswith("file "))
    return [] if files and counts.get("committing", 0) else ["no kill hit the writing, or none the commit"]


def main() -> None:
    """Runs the trials and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--commands", type=int, default=3, help="trials that kill the whole command")
    parser.add_argument("--size", type=make_snapshots.size_in_bytes, default=256 << 20, help="of the snapshot (256MiB)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, misses, start = random.Random(options.seed), [], time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, planned(Path(scratch), options.size, Path(scratch) / "dst") as case:
        counts = trials(case, options.trials, rng, misses)
        if options.trials >= 20:
            misses += unhit(counts)
        if options.commands:
            counts += command_trials(case, options.commands, rng, misses)
    print(f"{options.trials + options.commands} kills in {time.perf_counter() - start:.0f} s:", json.dumps(counts))
    print(f"{len(misses)} misses", *misses[:20], sep="\n  ")
    sys.exit(bool(misses))


if __name__ == "__main__":
    main()
