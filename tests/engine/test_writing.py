"""Running a write plan: the bytes, their digests, the pieces asked for, the memory, and every way of breaking off."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import pytest
import write_cases
from hypothesis import given
from hypothesis import strategies as st
from write_cases import LAST, MEMORY_BYTES, Source, expected, plan, run, tree

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.core.writing import Closing, Elements, Ending, Literal, TargetFile, WritePlan, widest_piece, windows
from ckptguard.engine import write_calls, write_windows, writing
from ckptguard.engine.digests import file_digests
from ckptguard.engine.staging import Staging
from ckptguard.engine.workers import SILENT
from ckptguard.engine.write_digests import digest_of, manifest_of
from ckptguard.fingerprint.manifest import parse
from ckptguard.formats.storage import Directory

_parts = st.lists(
    st.one_of(
        st.binary(max_size=30).map(lambda data: (Literal(data),)),
        st.builds(lambda n, step: (Elements(0, n, step),), st.integers(0, 90), st.integers(1, 40)),
        st.builds(lambda n: (Elements(0, n), Closing(12, write_cases.tail)), st.integers(0, 90)),
    ),
    max_size=8,
).map(lambda rows: tuple(part for row in rows for part in row))


def written(dst, of, fill, **kwargs):
    with Staging.open(dst, of.identity, what="a test") as staging:
        return writing.write(of, staging, fill, **kwargs), staging.path


@given(parts=_parts, spare=st.integers(0, 60))
def test_windows_cover_the_file_in_order_and_never_cut_a_step(parts, spare):
    file = TargetFile("f", parts)
    most = widest_piece(WritePlan((file,), "")) + spare
    cut = list(windows(file, most))
    assert [w.offset_bytes for w in cut] == [sum(w.length_bytes for w in cut[:n]) for n in range(len(cut))]
    assert sum(w.length_bytes for w in cut) == file.size_bytes
    assert all(w.length_bytes == sum(p.length_bytes for p in w.pieces) <= most for w in cut)
    pieces = [piece for w in cut for piece in w.pieces]
    left = iter(pieces)
    for number, part in enumerate(parts):
        at = 0
        while at < part.length_bytes:
            piece = next(left)
            assert piece.part is part
            assert piece.begin_bytes == at
            assert piece.closes == (number + 1 < len(parts) and isinstance(parts[number + 1], Closing))
            at += piece.length_bytes
            assert not isinstance(part, Closing) or at == part.length_bytes
            assert not isinstance(part, Elements) or at % part.step_bytes == 0 or at == part.length_bytes
        assert at == part.length_bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("threads", [1, 4])
def test_the_bytes_and_digests_are_those_of_the_plan(tmp_path, seed, threads):
    of = plan(seed=seed)
    digests, staging = written(tmp_path / "dst", of, Source(of), memory_bytes=6 * MEMORY_BYTES, threads=threads)
    found = tree(staging)
    del found[".ckptguard-journal"]
    assert found == expected(of)
    with Directory(staging) as files:
        assert digests == file_digests(files, list(expected(of)), SILENT)
    assert list(digests) == [file.path for file in of.files]


def test_without_isal_the_sums_are_the_same(tmp_path, monkeypatch):
    of = plan(1)
    monkeypatch.setattr(write_windows, "crc32", zlib.crc32)
    _, staging = written(tmp_path / "dst", of, Source(of))
    assert (staging / of.files[1].path).read_bytes() == expected(of)[of.files[1].path]


def test_elements_are_asked_for_once_and_in_whole_steps(tmp_path):
    of = WritePlan((TargetFile("f", (Literal(b"x" * 100), Elements(1, 100_000, 3000), Elements(2, 7, 3000))),), "i")
    source = Source(of)
    written(tmp_path / "dst", of, source, memory_bytes=3 * 4096)
    calls = sorted(source.calls)
    assert calls[-1] == (2, 0, 7)
    ends = [begin + length for _, begin, length in calls[:-1]]
    assert [begin for _, begin, _ in calls[:-1]] == [0, *ends[:-1]]
    assert ends[-1] == 100_000
    assert all(end % 3000 == 0 for end in ends[:-1])


@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 1 << 20])
def test_one_crc_runs_over_several_elements_and_an_ending_knows_them_all(tmp_path, memory_bytes):
    of = WritePlan(
        (
            TargetFile(
                "f",
                (
                    Elements(1, 9000, 8),
                    Elements(2, 77),
                    Elements(3, 20_000, 1000),
                    Closing(12, write_cases.tail, elements=2),
                    Literal(b"between"),
                    Elements(4, 0),
                    Elements(5, 10),
                    Closing(12, write_cases.tail, elements=2),
                    Elements(6, 3),
                    Ending(30, lambda crcs: b"%d:%08x,%08x" % (len(crcs), *crcs) + b"." * 11),
                ),
            ),
            TargetFile("g", (Elements(7, 40), Closing(12, write_cases.tail), Ending(8, lambda crcs: b"%08x" % crcs))),
        ),
        "i",
    )
    data = {key: write_cases.content(key, length) for key, length in write_cases.lengths(of).items()}
    first, second, third = (zlib.crc32(data[a] + data[b]) for a, b in ((2, 3), (4, 5), (7, 4)))
    _, staging = written(tmp_path / "dst", of, Source(of), memory_bytes=memory_bytes, threads=2)
    parts = [data[1], data[2], data[3], write_cases.tail(first), b"between", data[5], write_cases.tail(second), data[6]]
    assert (staging / "f").read_bytes() == b"".join(parts) + b"2:%08x,%08x" % (first, second) + b"." * 11
    assert (staging / "g").read_bytes() == data[7] + write_cases.tail(third) + b"%08x" % third


def test_an_ending_is_never_cut():
    file = TargetFile("f", (Literal(b"x" * 100), Ending(64, lambda crcs: bytes(64))))
    assert widest_piece(WritePlan((file,), "")) == 64
    assert [[piece.length_bytes for piece in window.pieces] for window in windows(file, 70)] == [[70], [30], [64]]


def test_thousands_of_tiny_tensors_are_stored_by_few_calls(tmp_path, monkeypatch):
    parts = [(Literal(b"h" * 64), Elements(n, 10), Closing(12, write_cases.tail)) for n in range(5000)]
    of = WritePlan((TargetFile("f", tuple(part for row in parts for part in row)),), "i")
    stored = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: stored.append(at) or real(handle, data, at))
    _, staging = written(tmp_path / "dst", of, Source(of))
    assert (staging / "f").read_bytes() == expected(of)["f"]
    assert stored == list(range(0, of.files[0].size_bytes, 128 << 10))


@pytest.mark.parametrize("memory_bytes", [2 * 4096, 5 << 20, 1 << 30])
def test_buffers_stay_within_the_budget(tmp_path, monkeypatch, memory_bytes):
    taken = []
    real = writing.aligned_buffer
    monkeypatch.setattr(writing, "aligned_buffer", lambda size: taken.append(size) or real(size))
    of = WritePlan((TargetFile("f", (Elements(1, 9 << 20),)),), "i")
    _, staging = written(tmp_path / "dst", of, Source(of), memory_bytes=memory_bytes, threads=16)
    assert sum(taken) <= memory_bytes
    assert len(taken) == {8192: 1, 5 << 20: 16, 1 << 30: 16}[memory_bytes]
    assert (staging / "f").read_bytes() == expected(of)["f"]


def test_too_little_memory_for_one_row_is_said_before_anything_is_written(tmp_path):
    of = WritePlan((TargetFile("f", (Elements(1, 1 << 20, 1 << 19),)),), "i")
    with pytest.raises(UsageError, match="needs 528384"):
        written(tmp_path / "dst", of, Source(of), memory_bytes=1 << 19)
    _, staging = written(tmp_path / "dst", of, Source(of), memory_bytes=528384)
    assert (staging / "f").stat().st_size == 1 << 20


def test_one_file_is_filled_by_several_threads_at_once(tmp_path):
    both = threading.Barrier(2, timeout=30)
    of = WritePlan((TargetFile("f", (Elements(1, 2 << 20),)),), "i")
    written(tmp_path / "dst", of, lambda key, begin, out: both.wait() and None, threads=2)


def test_progress_hears_of_every_byte_once(tmp_path):
    told = SimpleNamespace(phases=[], count=0, lock=threading.Lock())

    class Display:
        def start(self, label, total_bytes):
            told.phases.append((label, total_bytes))

        def advance(self, count_bytes):
            with told.lock:
                told.count += count_bytes

    of = plan()
    total = sum(file.size_bytes for file in of.files)
    written(tmp_path / "dst", of, Source(of), progress=Display())
    assert told.phases == [("writing", total)]
    assert told.count == total
    written(tmp_path / "dst", of, Source(of), progress=Display())
    assert told.phases[1:] == [("checking what was written before", total), ("writing", 0)]


def test_the_manifest_has_the_files_of_one_directory(tmp_path):
    of = plan(2)
    digests, _ = written(tmp_path / "dst", of, Source(of))
    digests |= {"iter_0000000/metadata.json": digest_of(b"{}"), "tracker.txt": digest_of(b"0")}
    manifest = parse(manifest_of(digests, {}, below="iter_0000000").to_bytes(), "here")
    assert sorted(manifest.files) == ["__0_0.distcp", "__1_0.distcp", "empty", "metadata.json"]
    assert len(manifest_of(digests, {}, below="").files) == 5


def test_plans_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="follows no elements"):
        TargetFile("f", (Literal(b""), Closing(1, write_cases.tail)))
    with pytest.raises(ValueError, match="follows 1 elements asks for the CRC-32 of 2"):
        TargetFile("f", (Elements(1, 5), Literal(b""), Elements(1, 5), Closing(1, write_cases.tail, elements=2)))
    with pytest.raises(ValueError, match="planned twice"):
        WritePlan((TargetFile("f", ()), TargetFile("f", ())), "i")
    for path in ("", "/f", "../f", "a//f", "a/./f"):
        with pytest.raises(ValueError, match="not a plain relative path"):
            WritePlan((TargetFile(path, ()),), "i")
    with pytest.raises(ValueError, match="in steps of 0"):
        Elements(1, 5, 0)


# Breaking off.


def broken_at(source, count, error):
    """A fill that raises from its count-th call on: threads may count past that one before it is looked at."""

    def fill(key, begin_bytes, out):
        source(key, begin_bytes, out)
        if len(source.calls) >= count:
            raise error

    return fill


@pytest.mark.parametrize("count", [1, 2, 9, 20])
def test_an_error_of_the_source_ends_the_run_and_the_next_one_goes_on(tmp_path, count):
    of, dst = plan(), tmp_path / "dst"
    with pytest.raises(ZeroDivisionError):
        written(dst, of, broken_at(Source(of), count, ZeroDivisionError()), memory_bytes=MEMORY_BYTES, threads=3)
    assert not dst.exists()
    assert not {thread.name for thread in threading.enumerate() if thread.name.startswith("ckptguard-write")}
    run(dst, of, Source(of))
    assert tree(dst) == {**expected(of), **LAST}


def test_a_wrong_closing_part_is_an_error(tmp_path):
    of = WritePlan((TargetFile("f", (Elements(1, 5), Closing(12, lambda crc: b"short"))),), "i")
    with pytest.raises(ValueError, match="memoryview assignment"):
        written(tmp_path / "dst", of, Source(of))


def test_an_interrupt_leaves_a_journal_that_the_next_run_reads(tmp_path):
    of, dst = plan(12), tmp_path / "dst"
    source, once = Source(of), threading.Lock()

    def fill(key, begin_bytes, out):
        source(key, begin_bytes, out)
        if len(source.calls) >= 60 and once.acquire(blocking=False):  # another thread may have counted past it already
            os.kill(os.getpid(), signal.SIGINT)
        if len(source.calls) >= 60:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        written(dst, of, fill, memory_bytes=MEMORY_BYTES)
    second, undisturbed = Source(of), Source(of)
    run(dst, of, second)
    run(tmp_path / "other", of, undisturbed)
    assert 0 < len(second.calls) < len(undisturbed.calls)
    assert tree(dst) == {**expected(of), **LAST}


@pytest.mark.parametrize("call", ["pwrite", "fsync", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_an_error_with_the_file_and_the_next_run_goes_on(tmp_path, monkeypatch, call, code):
    of, dst = plan(), tmp_path / "dst"
    real, seen = getattr(os, call), []

    def failing(handle, *args):
        seen.append(handle)
        if len(seen) == 3:
            raise OSError(code, os.strerror(code))
        return real(handle, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(EnvironmentFailedError, match=rf"dst\.partial-.*bytes\): {os.strerror(code)}") as caught:
            run(dst, of, Source(of))
    assert caught.value.exit_code == 6
    assert not dst.exists()
    run(dst, of, Source(of))
    assert tree(dst) == {**expected(of), **LAST}


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: real(handle, data[:777], at))
    of = plan(1)
    run(tmp_path / "dst", of, Source(of))
    assert tree(tmp_path / "dst") == {**expected(of), **LAST}


def fallocate_says(code):
    """A C library whose fallocate fails."""

    def fallocate(*args):
        write_calls.ctypes.set_errno(code)
        return -1

    return lambda: SimpleNamespace(fallocate=fallocate, sync_file_range=lambda *args: 0)


def test_space_is_reserved_where_that_is_possible(tmp_path, monkeypatch):
    of = plan(1)
    monkeypatch.setattr(write_calls, "_libc", fallocate_says(errno.EOPNOTSUPP))
    run(tmp_path / "dst", of, Source(of))
    monkeypatch.setattr(write_calls, "_libc", fallocate_says(errno.ENOSPC))
    source = Source(of)
    with pytest.raises(EnvironmentFailedError, match=r"__0_0\.distcp: cannot be written \(\d+ bytes\): No space left"):
        run(tmp_path / "other", of, source)
    assert source.calls == []


def test_too_little_space_is_said_before_the_first_byte(tmp_path, monkeypatch):
    of, source = plan(), Source(plan())
    needed = sum(file.size_bytes for file in of.files)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    with pytest.raises(EnvironmentFailedError, match=f"{needed} bytes are needed, 4096 are free"):
        run(tmp_path / "dst", of, source)
    assert source.calls == []


# From the first file's first window to the rename; "rename" and "unlink" have one call each in a run without leftovers.
@pytest.mark.parametrize(
    ("call", "count"),
    [("pwrite", 1), ("pwrite", 9), ("fsync", 2), ("write", 3), ("write", 5), ("unlink", 1), ("rename", 1)],
)
def test_a_killed_run_started_again_gives_the_same_bytes(tmp_path, call, count):
    dst = tmp_path / "dst"
    command = [sys.executable, write_cases.__file__, str(dst), call, str(count)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not dst.exists()
    run(dst, plan(), Source(plan()))
    assert tree(dst) == {**expected(plan()), **LAST}
    assert os.listdir(tmp_path) == ["dst"]
