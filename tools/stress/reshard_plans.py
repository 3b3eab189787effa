"""Plans there and back again for thousands of random layouts: ``python tools/stress/reshard_plans.py [COUNT]``.

Runs tests/convert/test_reshard_plans.py, which draws two layouts and two forms of optimizer state for each example.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
COUNT = 3000


def main() -> int:
    """Runs the examples; the exit code says whether all came back as they were."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:faulthandler", "tests/convert/test_reshard_plans.py"]
    environment = os.environ | {"CKPTGUARD_PLAN_EXAMPLES": str(count)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    print(
        f"{count} pairs of layouts planned there and back: {'all' if done.returncode == 0 else 'NOT all'} the identity"
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
