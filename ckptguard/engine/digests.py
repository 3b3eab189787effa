"""Digesting files: BLAKE3 of all bytes, XXH3 of blocks; one pass, one buffer per thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptguard.core.errors import DamagedError
from ckptguard.core.problems import Problem
from ckptguard.engine.structure import rank_of
from ckptguard.engine.workers import BUFFER_BYTES, Buffers, Progress, aligned_buffer, default_threads, run
from ckptguard.fingerprint.manifest import FileDigest, block_bytes_for
from ckptguard.formats.storage import Directory

_WIDE_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a file turned out to be: the BLAKE3 ("" if it was not asked for) and block digests ("" likewise)."""

    name: str
    blake3: str
    blocks: bytes
    error: DamagedError | None = None


def digest_files(
    files: Directory,
    wanted: Sequence[tuple[str, int]],
    progress: Progress,
    *,
    whole: bool = True,
    blocks: bool = True,
    threads: int | None = None,
) -> Iterator[Outcome]:
    """Digests files, in any order.

    Many files are spread over the threads, one thread each; a file so large that the others would wait for it is hashed by
    all threads at once.

    Args:
        files: The directory.
        wanted: Relative paths, each with its block size in bytes.
        progress: Hears of the bytes done.
        whole: Compute BLAKE3 of the whole file.
        blocks: Compute the block digests.
        threads: Worker threads; as many as cores by default.
    """
    count = threads or default_threads()
    sizes = {name: files.size(name) for name, _ in wanted}
    share = sum(sizes.values()) // count
    alone = [
        item
        for item in wanted
        if whole and not blocks and count > 1 and sizes[item[0]] > max(share, 4 * _WIDE_BUFFER_BYTES)
    ]
    large = {name for name, _ in alone}
    spread = sorted((item for item in wanted if item[0] not in large), key=lambda item: -sizes[item[0]])
    buffers = Buffers()

    def work(item: tuple[str, int]) -> Outcome:
        return _digest(files, item, buffers.view, progress, whole=whole, blocks=blocks, hash_threads=1)

    wide = aligned_buffer(_WIDE_BUFFER_BYTES) if alone else memoryview(b"")
    for item in alone:
        yield _digest(files, item, wide, progress, whole=whole, blocks=False, hash_threads=count)
    yield from run(spread, work, threads=count)


def _digest(
    files: Directory,
    item: tuple[str, int],
    buffer: memoryview,
    progress: Progress,
    *,
    whole: bool,
    blocks: bool,
    hash_threads: int,
) -> Outcome:
    from blake3 import blake3
    from xxhash import xxh3_64_intdigest

    name, block = item
    hasher, prints, done, size = blake3(max_threads=hash_threads), bytearray(), 0, files.size(name)
    try:
        while done < size:
            part = buffer[: min(len(buffer), size - done)]
            files.read_into(name, done, part)
            if whole:
                hasher.update(part)
            if blocks:  # blocks are powers of two up to the buffer's size, so no block crosses a read
                for at in range(0, len(part), block):
                    prints += xxh3_64_intdigest(part[at : at + block]).to_bytes(8, "little")
            done += len(part)
            progress.advance(len(part))
    except DamagedError as error:
        return Outcome(name, "", b"", error)
    return Outcome(name, hasher.hexdigest() if whole else "", bytes(prints))


def file_digests(
    files: Directory, names: Sequence[str], progress: Progress, threads: int | None = None
) -> dict[str, FileDigest]:
    """Digests for a manifest, by name.

    Raises:
        DamagedError: A file changed its size while it was read.
    """
    wanted = [(name, block_bytes_for(files.size(name))) for name in names]
    assert all(block <= BUFFER_BYTES for _, block in wanted)
    sizes, block_sizes, out = {name: files.size(name) for name in names}, dict(wanted), {}
    for outcome in digest_files(files, wanted, progress, threads=threads):
        if outcome.error:
            raise outcome.error
        out[outcome.name] = FileDigest(sizes[outcome.name], outcome.blake3, block_sizes[outcome.name], outcome.blocks)
    return out


def changed_blocks(sealed: FileDigest, blocks: bytes) -> list[tuple[int, int]]:
    """Runs of blocks whose digest is not the sealed one, half-open, blocks beyond either end included."""
    count = max(len(sealed.blocks), len(blocks)) // 8
    changed = [n for n in range(count) if sealed.blocks[8 * n : 8 * n + 8] != blocks[8 * n : 8 * n + 8]]
    runs: list[tuple[int, int]] = []
    for number in changed:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def size_problem(name: str, sealed: FileDigest, size_bytes: int) -> Problem | None:
    """The problem of a file that is not as long as it was."""
    if sealed.size_bytes == size_bytes:
        return None
    verb = "cut short" if size_bytes < sealed.size_bytes else "longer"
    message = f"{name}: {verb}: {size_bytes} bytes, sealed with {sealed.size_bytes}"
    low, high = sorted((sealed.size_bytes, size_bytes))
    return Problem("size", message, file=name, bytes_range=(low, high), rank=rank_of(name))
