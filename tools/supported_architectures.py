"""Tries every architecture that Megatron-Bridge registers, at tiny size, and writes docs/supported.md.

    python tools/supported_architectures.py [--only NAME ...] [--jobs N] [--again] [--page-only]

For each one a small snapshot is made, imported (which proves itself), exported, and compared bit for bit with what it
was. Results are kept in ``tools/supported/results.json``: a broken-off run goes on, ``--again`` forgets them, other
versions of the packages too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from supported import page, results
from supported.results import Result

ATTEMPT = Path(__file__).with_name("supported") / "attempt.py"
TIMEOUT_SECONDS = 150


def main() -> int:
    """Runs what is asked for, and writes the page."""
    options = _options()
    known, kept = results.read()
    found = {result.case: result for result in kept if known == results.versions()}
    wanted = [c for c in results.cases() if not options.only or c in options.only]
    unknown = set(options.only) - set(wanted)
    if unknown:
        print(f"not registered: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    todo = [] if options.page_only else [c for c in wanted if options.again or c not in found]
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(_attempt, case) for case in todo]):
            result = done.result()
            found[result.case] = result
            results.write(found.values())
            print(f"{result.case}: {result.layout or 'not imported'} {result.round_trip} {result.note}", flush=True)
    page.PAGE.write_text(page.text(*results.read()))
    return 0


def _attempt(case: str) -> Result:
    """Runs a case in a process group of its own, which ends with it."""
    with tempfile.TemporaryDirectory() as directory:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", ATTEMPT, case, directory], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            answer, errors = child.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return Result(case, case, note=f"no answer within {TIMEOUT_SECONDS} s")
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
    if child.returncode or not answer:
        last = errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        return Result(case, case, note=f"a bug of the attempt: {last[0]}")
    found = json.loads(answer)
    found["note"] = found["note"].replace(directory, "SNAPSHOT")
    return Result(case, **found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="families of the suite or architectures")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="attempts at once; 12 GB and a core each")
    parser.add_argument("--again", action="store_true", help="what is known already too")
    parser.add_argument("--page-only", action="store_true", help="write the page from the kept results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
