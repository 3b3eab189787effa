"""Random damage by the thousand: single bit flips (and pages, cuts, appended bytes, swaps), each detected and placed.

An oracle of its own says where each tensor's bytes are: torch's metadata and Python's zipfile, not ckptguard's readers. A
trial that goes unnoticed, or is placed at the wrong file, block or tensor, is a miss; so is any alarm on the clean copy,
which is checked again every hundred trials. Exits 1 on any miss.
"""

from __future__ import annotations

import argparse
import io
import pickle
import random
import shutil
import sys
import tempfile
import time
import zipfile
from bisect import bisect_right
from collections import Counter
from pathlib import Path

from ckptguard.core.problems import Problem
from ckptguard.engine.seal import seal
from ckptguard.engine.verify import verify
from ckptguard.fingerprint.manifest import FILE_NAME
from ckptguard.formats.registry import open_checkpoint
from ckptguard.testing import damage

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DEFAULT = [
    "megatron-0.19/dense_tp2pp2_dp_reshardable/iter_0000004",
    "megatron-0.19/moe_pp2ep2_fully_reshardable/iter_0000004",
    "megatron-0.19/dense_tp2pp2_legacy_torch/iter_0000004",
]
Region = tuple[int, int, str]  # begin, end, tensor


def data_start(data: bytes, info: zipfile.ZipInfo) -> int:
    """First byte of a zip record's data."""
    name, extra = (
        int.from_bytes(data[info.header_offset + at : info.header_offset + at + 2], "little") for at in (26, 28)
    )
    return info.header_offset + 30 + name + extra


def dcp_regions(path: Path) -> dict[str, list[Region]]:
    """Per file, where the elements of each tensor's chunks stand."""
    out: dict[str, list[Region]] = {}
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.offset is None:
            continue
        blob = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        archive = zipfile.ZipFile(io.BytesIO(blob))
        record = next(r for r in archive.infolist() if r.filename.endswith("/data/0"))
        begin = info.offset + data_start(blob, record)
        out.setdefault(info.relative_path, []).append((begin, begin + record.file_size, index.fqn))
    for regions in out.values():
        regions.sort()
    return out


def tensor_at(regions: dict[str, list[Region]], file: str, byte: int) -> str | None:
    """The tensor whose elements hold a byte, or None for headers, objects and padding."""
    found = regions.get(file, [])
    number = bisect_right(found, (byte, 1 << 62, "")) - 1
    return found[number][2] if number >= 0 and byte < found[number][1] else None


def fault(rng: random.Random, path: Path, kind: str) -> damage.Damage:
    """Does one damage."""
    files = [*damage.data_files(path), *(p for p in (path / ".metadata", path / "metadata.json") if p.exists())]
    weights = [p.stat().st_size for p in files]
    (file,) = rng.choices(files, weights)
    if kind == "bit":
        return damage.flip_bit(file, rng.randrange(file.stat().st_size), rng.randrange(8), path)
    if kind == "swap":
        one, other = rng.sample(damage.data_files(path), 2)
        return damage.swap(one, other, path)
    how = {"page": damage.zero_page, "cut": damage.truncate, "append": damage.lengthen}[kind]
    return how(file, path, rng)


def placed(problems: list[Problem], done: damage.Damage, tensor: str | None) -> str | None:
    """Why the report does not place the damage, or None."""
    hits = [p for p in problems if p.is_damage and p.file == done.files[0]]
    if not hits:
        return "not noticed"
    if done.byte is not None:
        here = [p for p in hits if p.bytes_range and p.bytes_range[0] <= done.byte < p.bytes_range[1]]
        if not here:
            return "not placed at its bytes"
        if tensor is not None and tensor not in {p.tensor for p in here}:
            return f"placed in {sorted({str(p.tensor) for p in here})}, not in {tensor}"
    strangers = {p.file for p in problems if p.is_damage} - set(done.files)
    return f"blames {sorted(map(str, strangers))} too" if strangers else None


def trials(
    source: Path, count: int, kinds: list[str], mode: str, rng: random.Random, misses: list[str]
) -> Counter[str]:
    """Runs trials on one checkpoint; restores the damaged files after each."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ckpt"
        shutil.copytree(source, path)
        with open_checkpoint(path) as checkpoint:
            seal(checkpoint)
        regions = dcp_regions(path) if (path / ".metadata").exists() else {}
        kept = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != FILE_NAME}
        for number in range(count):
            if number % 100 == 0:
                report = verify(path, mode=mode)
                if report.damaged:
                    misses.append(f"{source}: false alarm {report.problems}")
            kind = rng.choice(kinds)
            done = fault(rng, path, kind)
            tensor = tensor_at(regions, done.files[0], done.byte) if kind == "bit" and done.byte is not None else None
            report = verify(path, mode=mode)
            reason = placed(report.problems, done, tensor)
            counts[kind] += 1
            counts["placed to the tensor"] += tensor is not None and reason is None
            if reason:
                misses.append(f"{source.parent.name}: {done}: {reason}")
            for name in done.files:
                (path / name).write_bytes(kept[path / name])
    return counts


def main() -> None:
    """Runs the trials and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="bit", help="comma-separated: bit, page, cut, append, swap")
    parser.add_argument("--mode", default="full", choices=["full", "quick"])
    options = parser.parse_args()
    rng, misses, total, start = random.Random(options.seed), [], Counter(), time.perf_counter()
    for number, name in enumerate(DEFAULT):
        share = options.trials // len(DEFAULT) + (number < options.trials % len(DEFAULT))
        total += trials(FIXTURES / name, share, options.kinds.split(","), options.mode, rng, misses)
    print(
        f"{sum(total[k] for k in options.kinds.split(','))} trials in {time.perf_counter() - start:.0f} s:", dict(total)
    )
    print(f"{len(misses)} misses", *misses[:20], sep="\n  ")
    sys.exit(bool(misses))


if __name__ == "__main__":
    main()
