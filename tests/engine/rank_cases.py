"""One rank of a shared run, as a process: ``python rank_cases.py`` under torchrun, or forked by ``test_ranks``.

What it ends with is left in ``<log>/<rank>``; its exit code is the one that the command line gives.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from write_cases import LAST, MEMORY_BYTES, Source, plan

from ckptguard.core.errors import CkptguardError, DamagedError
from ckptguard.engine import peers, shared_staging
from ckptguard.engine.ranks import world

PLAN = plan(8)


class Behaving(Source):
    """A source that does something at the first byte after its rank has finished a file."""

    def __init__(self, how: str, staging: Path, log: Path) -> None:
        super().__init__(PLAN)
        self._how = how
        self._staging = staging
        self._log = log

    def __call__(self, key: int, begin_bytes: int, out: memoryview) -> None:
        super().__call__(key, begin_bytes, out)
        if self._how and any(b'"file"' in path.read_bytes() for path in self._staging.glob(".ckptguard-journal*")):
            (self._log / f"{self._how}-{os.getpid()}").touch()
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self._how == "hangs":
                time.sleep(60)
            if self._how == "raises":
                raise DamagedError("model.bin: damaged")
            if self._how == "full":
                raise OSError(28, "No space left on device")
            time.sleep(0.05)  # "slow"


def work(dst: Path, log: Path, how: str, identity: str) -> None:
    """What a command does: plans, writes its part, and tells rank 0 which elements it made."""
    with peers.joined(world()) as others:
        of = PLAN if not identity else type(PLAN)(PLAN.files, identity)
        with shared_staging.Shared.open(dst, of, what="a test", peers=others) as shared:
            source = Behaving(how, shared.path, log)
            shared.write(source, memory_bytes=MEMORY_BYTES, threads=2)
            made = " ".join(sorted({str(key // 100) for key, _, _ in source.calls}))
            (log / f"made-{others.world.rank}").write_text(made)
            gathered = shared.gather(made.encode())
            if gathered is not None:
                assert list(gathered.digests) == [file.path for file in of.files]
                assert len(gathered.results) == others.world.size
                (log / "results").write_bytes(b" ".join(gathered.results))
                shared.commit(LAST)
            shared.done()
            assert (dst / "latest_checkpointed_iteration.txt").exists()


def rank(environment: Mapping[str, str], dst: Path, log: Path, how: str = "", identity: str = "") -> None:
    """Runs a rank and ends the process."""
    os.environ.update(environment)
    for name, seconds in (("SILENCE", 4.0), ("LINGER", 2.0), ("GRACE", 6.0)):
        setattr(peers, f"{name}_SECONDS", seconds)
    if how == "early":
        peers.ARRIVAL_SECONDS = 1.0
    if how == "hangs":
        peers.STALL_SECONDS = peers.GRACE_SECONDS = 1.0
    code, said = 0, "done"
    try:
        work(dst, log, how, identity)
    except CkptguardError as error:
        code, said = int(error.exit_code), str(error)
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    (log / os.environ.get("RANK", "0")).write_text(said)
    sys.exit(code)


if __name__ == "__main__":
    directory, mine = Path(sys.argv[1]), dict(argument.split("=") for argument in sys.argv[2:])
    rank({}, directory / "dst", directory / "log", mine.get(os.environ["RANK"], ""))
