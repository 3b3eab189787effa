"""``ckptguard reshard``, which also says how long its parts took.

    python tools/benchmarks/timed_reshard.py TIMES.json SRC DST [options of ckptguard reshard]

It is the command itself, in this process; under torchrun rank 0 writes the times.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ckptguard.cli.main import main
from ckptguard.convert import resharding
from ckptguard.engine.workers import Progress


class Phases:
    """A progress display that passes everything on, and remembers when each phase began."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self.begun: dict[str, float] = {}

    def start(self, label: str, total_bytes: int) -> None:
        """A phase begins."""
        self.begun.setdefault(label, time.perf_counter())
        self._shown.start(label, total_bytes)

    def advance(self, count_bytes: int) -> None:
        """So many more bytes are done."""
        self._shown.advance(count_bytes)


def timed(into: Path) -> None:
    """Has the part after planning timed: ``told`` of it all, and of each phase up to the next one, in seconds."""
    real = resharding.run_reshard

    def run(*args: Any, progress: Progress, **kwargs: Any) -> Any:
        phases, start = Phases(progress), time.perf_counter()
        done = real(*args, progress=phases, **kwargs)
        end = time.perf_counter()
        if os.environ.get("RANK", "0") == "0":
            ends = [*list(phases.begun.values())[1:], end]
            parts = {name: to - begin for (name, begin), to in zip(phases.begun.items(), ends, strict=True)}
            into.write_text(json.dumps({"told": end - start, **parts}))
        return done

    resharding.run_reshard = run


if __name__ == "__main__":
    timed(Path(sys.argv[1]))
    sys.argv[1:] = ["reshard", *sys.argv[2:]]
    sys.exit(main())
