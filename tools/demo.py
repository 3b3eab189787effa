"""The demo: the main job on a real trained model, and what a damaged byte looks like. Run through ``tools/demo``."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".demo"
SNAPSHOT = WORK / "smollm2"
DAMAGED = WORK / "smollm2-damaged"


def step(text: str) -> None:
    """Says what comes next."""
    print(f"\n\033[1m# {text}\033[0m", flush=True)


def ckptguard(*arguments: str | Path, expect: int = 0, quiet: bool = False) -> str:
    """Runs a command as a user would, shows it, and insists on its exit code."""
    words = ["ckptguard", *map(str, arguments)]
    print("$ " + shlex.join(words).replace(str(ROOT) + "/", ""), flush=True)
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    output = done.stdout + done.stderr
    if not quiet:
        lines = output.replace(str(ROOT) + "/", "").splitlines()
        print(
            "\n".join(
                lines if len(lines) <= 30 else [*lines[:12], f"   ... {len(lines) - 24} more lines", *lines[-12:]]
            )
        )
    if done.returncode != expect:
        sys.exit(f"exit code {done.returncode}, expected {expect}:\n{output}")
    print(f"(exit code {done.returncode})", flush=True)
    return done.stdout


def main() -> None:
    """Runs the demo; leaves the snapshot in .demo for the next time."""
    step("A real model: SmolLM2-135M-Instruct as a Hugging Face snapshot")
    subprocess.run([sys.executable, ROOT / "tools" / "smollm2_snapshot.py", SNAPSHOT], check=True)
    (SNAPSHOT / "ckptguard.json.zst").unlink(missing_ok=True)
    ckptguard("inspect", SNAPSHOT)

    step("Its fingerprints: one line a tensor, one root for all")
    before = json.loads(ckptguard("fingerprint", SNAPSHOT, "--json", "-o", WORK / "kept.json", quiet=True))
    print(f"  {len(before['tensors'])} tensors, root {before['roots']['whole']}")

    step("Seal it, keep the seal, verify")
    seal = json.loads(ckptguard("seal", SNAPSHOT, "--json", quiet=True))["seal"]
    print(f"  seal {seal}")
    ckptguard("verify", SNAPSHOT, "--against", seal)

    step("Damage one byte of a copy")
    shutil.rmtree(DAMAGED, ignore_errors=True)
    shutil.copytree(SNAPSHOT, DAMAGED)
    file = sorted(DAMAGED.glob("*.safetensors"))[0]
    at = file.stat().st_size // 3
    with file.open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 0x10]))
    print(f"  byte {at} of {file.name}: {byte:#04x} -> {byte ^ 0x10:#04x}")

    step("Found, and placed: file, block, tensor, box")
    ckptguard("verify", DAMAGED, expect=4)

    step("What it did to the model: exactly one element")
    ckptguard("diff", SNAPSHOT, DAMAGED, expect=3)

    step("The kept fingerprints find it without the manifest, too")
    (DAMAGED / "ckptguard.json.zst").unlink()
    ckptguard("verify", DAMAGED, "--against", WORK / "kept.json", expect=4)
    shutil.rmtree(DAMAGED)
    print("\nDone. The snapshot stays in .demo/smollm2.")


if __name__ == "__main__":
    main()
