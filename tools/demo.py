"""The demo: the main job on a real trained model, and what a damaged byte looks like. Run through ``tools/demo``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".demo"
SNAPSHOT = WORK / "smollm2"
MEGATRON = WORK / "megatron"
RESHARDED = WORK / "megatron-tp1-pp4"
BACK = WORK / "megatron-back"
VERIFIED = WORK / "verify-resume"
NODES = WORK / "nodes"
EXPORTED = WORK / "smollm2-exported"
DAMAGED = WORK / "smollm2-damaged"
PROMPT = "The capital of France is"


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


def next_word(root: Path) -> None:
    """Asks the imported model, in real Megatron processes under TP 3, PP 2, how a sentence goes on."""
    from transformers import AutoTokenizer

    from ckptguard.testing.families import Layout
    from ckptguard.testing.megatron_loads import Megatron

    tokenizer = AutoTokenizer.from_pretrained(root / "release" / "tokenizer")
    tokens = tokenizer(PROMPT).input_ids
    with Megatron("local") as megatron:
        _, more = megatron.logits(root, Layout(tp=3, pp=2), tokens, vocab_size=len(tokenizer), new_tokens=1)
    word = tokenizer.decode(more[:1])
    print(f"  {PROMPT!r} goes on with {word!r}")
    if word != " Paris":
        sys.exit("that is not what the model says on the hub")


def on_two_nodes() -> None:
    """Splits the checkpoint over two directories, as two nodes with disks of their own would have it, and prepares a view."""
    shutil.rmtree(NODES, ignore_errors=True)
    for number, ranks in enumerate(("012", "345")):
        folder = NODES / f"node{number}" / "ckpt" / "release"
        folder.mkdir(parents=True)
        for file in (MEGATRON / "release").iterdir():
            if file.name.startswith("__"):
                if file.name[2] in ranks:
                    os.link(file, folder / file.name)
            elif number == 0 and file.is_file():
                os.link(file, folder / file.name)
    shutil.copy(MEGATRON / "latest_checkpointed_iteration.txt", NODES / "node0" / "ckpt")
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    layout = ("--tp", "3", "--pp", "2", "--ranks-per-node", "3")
    nodes = []
    for number in range(2):
        at = NODES / f"node{number}"
        words = ["ckptguard", "view", "prepare", str(at / "ckpt"), "--view", str(at / "view"), *layout]
        words += ["--nodes", "2", "--node-rank", str(number), "--rdzv", f"127.0.0.1:{port}"]
        print("$ " + shlex.join(words).replace(str(ROOT) + "/", "") + (" &" if number == 0 else ""), flush=True)
        nodes.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT))
    for node in nodes:
        print(node.communicate()[0].replace(str(ROOT) + "/", ""), end="")
        if node.returncode:
            sys.exit(f"exit code {node.returncode}, expected 0")
        print(f"(exit code {node.returncode})", flush=True)


def main() -> None:
    """Runs the demo; leaves the snapshot in .demo for the next time."""
    step("A real model: SmolLM2-135M-Instruct as a Hugging Face snapshot")
    subprocess.run([sys.executable, ROOT / "tools" / "smollm2_snapshot.py", SNAPSHOT], check=True)
    (SNAPSHOT / "ckptguard.json.zst").unlink(missing_ok=True)
    ckptguard("inspect", SNAPSHOT)

    for folder in (MEGATRON, EXPORTED):
        shutil.rmtree(folder, ignore_errors=True)
    step("To a Megatron checkpoint for TP 3, PP 2: no GPU, no Transformer Engine, proved tensor by tensor")
    ckptguard("import", SNAPSHOT, MEGATRON, "--tp", "3", "--pp", "2")
    ckptguard("verify", MEGATRON)

    step("Another layout, TP 1, PP 4, and back: equal roots")
    for folder in (RESHARDED, BACK):
        shutil.rmtree(folder, ignore_errors=True)
    ckptguard(
        "reshard", MEGATRON, RESHARDED, "--tp", "1", "--pp", "4", "--first-pp-layers", "7", "--last-pp-layers", "7"
    )
    ckptguard("reshard", RESHARDED, BACK, "--tp", "3", "--pp", "2", quiet=True)
    roots = [json.loads(ckptguard("fingerprint", root, "--json", quiet=True))["roots"] for root in (MEGATRON, BACK)]
    print(f"  roots {roots[0]['whole'][:16]}... and {roots[1]['whole'][:16]}...")
    if roots[0] != roots[1]:
        sys.exit("the roots differ")
    shutil.rmtree(RESHARDED)
    shutil.rmtree(BACK)

    step("And back to the hub's form: nothing differs")
    ckptguard("export", MEGATRON, EXPORTED)
    ckptguard("diff", SNAPSHOT, EXPORTED)

    step("Six Megatron processes load it and say the next word")
    next_word(MEGATRON)

    step("On node-local disks half of it would be on each node: one view, whole and verified on both")
    on_two_nodes()

    step("A seal that can be kept elsewhere")
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
    shutil.rmtree(DAMAGED)

    shutil.rmtree(VERIFIED, ignore_errors=True)
    steps = ("verify-resume", "--builtin", "gpt", "--steps", "6", "--save-at", "3")
    step("Before a long run: saved and resumed, a small Megatron model goes on as if it had not been stopped")
    ckptguard(*steps, "--work", VERIFIED / "clean")
    step("The lowest bit of one element of one optimizer state flipped on the way: found and named")
    ckptguard(*steps, "--plant", "exp_avg-bit", "--work", VERIFIED / "planted", expect=3)
    for name in ("clean", "planted"):
        print(f"  report: {(VERIFIED / name / 'report.html').relative_to(ROOT)}")
    print("\nDone. The snapshot stays in .demo/smollm2, the Megatron checkpoint in .demo/megatron.")


if __name__ == "__main__":
    main()
