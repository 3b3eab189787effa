"""Several processes that write one target: the bytes, every way in which one of them ends, and going on with others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import rank_cases
from write_cases import LAST, Source, expected, plan, run, tree

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.core.writing import Elements, TargetFile, WritePlan
from ckptguard.engine import peers, ranks, shared_staging
from ckptguard.engine.ranks import World, share, world
from ckptguard.engine.shared_staging import RankStaging, Shared
from ckptguard.engine.staging import Staging
from ckptguard.engine.write_journal import Journal

PLAN = rank_cases.PLAN
WHOLE = {**expected(PLAN), **LAST}
ENVIRONMENT = [
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS",
    "SLURM_TASKS_PER_NODE",
]  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def context():
    """Processes forked from one that has imported torch already."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["rank_cases", "torch.distributed"])
    return context


class Ranks:
    """Processes of one run."""

    def __init__(self, context, folder, size, hows=None, identities=None, started=None):
        self.log = folder / f"log{len(list(folder.glob('log*')))}"
        self.log.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.processes = []
        for rank in started or range(size):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
            }
            arguments = (
                environment,
                folder / "dst",
                self.log,
                (hows or {}).get(rank, ""),
                (identities or {}).get(rank, ""),
            )
            self.processes.append(context.Process(target=rank_cases.rank, args=arguments))
            self.processes[-1].start()

    def ended(self, *ranks):
        """Exit codes and last words."""
        codes, words = [], []
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].join(50)
            codes.append(self.processes[rank].exitcode)
            words.append((self.log / str(rank)).read_text() if (self.log / str(rank)).exists() else None)
        return codes, words

    def wait_for(self, pattern):
        until = time.monotonic() + 30
        while not list(self.log.glob(pattern)):
            assert time.monotonic() < until
            time.sleep(0.02)

    def made(self):
        """Numbers of the files that each rank wrote."""
        return [{int(n) for n in (self.log / f"made-{r}").read_text().split()} for r in range(len(self.processes))]


def finished_before(folder):
    """Numbers of the files that a broken-off run noted as finished."""
    journals = next(folder.glob("dst.partial-*")).glob(".ckptguard-journal*")
    text = "".join(path.read_text() for path in journals)
    return {number for number in range(8) if f'"file":"iter_0000000/__{number}_0.distcp"' in text}


def test_the_shares_are_the_plan_and_even(monkeypatch):
    sizes = [7, 90, 0, 30, 31, 29, 5, 60]
    of = WritePlan(tuple(TargetFile(str(n), (Elements(n, size),)) for n, size in enumerate(sizes)), "i")
    assert share(of, 1) == (of,)
    for size in (2, 3, 5, 12):
        shares = share(of, size)
        assert shares == share(of, size)
        assert [one.identity for one in shares] == ["i"] * size
        assert sorted(file.path for one in shares for file in one.files) == sorted(file.path for file in of.files)
        assert all(
            [int(file.path) for file in one.files] == sorted(int(file.path) for file in one.files) for one in shares
        )
        loads = [sum(file.size_bytes for file in one.files) for one in shares]
        assert max(loads) <= max(90, sum(sizes) / size + 30)


@pytest.mark.parametrize(
    ("environment", "rdzv", "found"),
    [
        ({}, None, World()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None, World()),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, None, World()),
        (
            {"RANK": "9", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            None, World(9, 32, 8, "env://", "a:1"),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "34", "SLURM_TASKS_PER_NODE": "8(x4),2"},
            "n1:29500", World(1, 34, 8, "tcp://n1:29500", "n1:29500"),
        ),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "[fe80::1]:9", World(1, 2, 1, "tcp://[fe80::1]:9", "[fe80::1]:9")),
    ],
)  # fmt: skip
def test_the_world_is_what_the_launcher_says(environment, rdzv, found, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert world(rdzv) == found


@pytest.mark.parametrize(
    ("environment", "rdzv", "message"),
    [
        ({}, "a:1", "--rdzv a:1: no rank of a run"),
        ({"RANK": "0"}, None, "WORLD_SIZE is '', not a number"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None, "RANK is 'x', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None, "RANK is 2 and WORLD_SIZE is 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None, "MASTER_ADDR and MASTER_PORT do not say"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, None, "MASTER_PORT is ''"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "a", "not of the form host:port"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "a:1?rank=3", "not of the form host:port"),
    ],
)
def test_a_world_that_makes_no_sense_is_refused(environment, rdzv, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        world(rdzv)


def test_threads_are_a_fair_part_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(ranks, "default_threads", lambda: 16)
    assert [World(0, 8, n).threads(None) for n in (1, 4, 8, 64, 100)] == [16, 16, 8, 1, 1]
    assert World(0, 8, 8).threads(3) == 3


def test_a_single_process_uses_the_plain_staging_and_no_torch(tmp_path):
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; import rank_cases\n"
        "root = Path(sys.argv[1]); rank_cases.work(root / 'dst', root, '', '')\n"
        "assert not any(name.split('.')[0] == 'torch' for name in sys.modules), 'torch'"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, Path(__file__).parent], check=True, timeout=60)
    assert tree(tmp_path / "dst") == WHOLE
    with peers.joined(world()) as one, Shared.open(tmp_path / "dst2", PLAN, what="a test", peers=one) as shared:
        assert type(shared._staging) is Staging
        assert shared.own == PLAN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_give_the_bytes_of_one_process(tmp_path, context, size):
    of = Ranks(context, tmp_path, size)
    assert of.ended() == ([0] * size, ["done"] * size)
    assert tree(tmp_path / "dst") == WHOLE
    assert sorted(os.listdir(tmp_path)) == ["dst", "log0"]
    made = of.made()
    assert all(made)
    assert sorted(number for numbers in made for number in numbers) == list(range(8))
    assert sorted((of.log / "results").read_text().split()) == sorted(str(number) for number in range(8))


def test_a_killed_rank_ends_the_others_and_any_number_goes_on(tmp_path, context):
    of = Ranks(context, tmp_path, 3, {0: "slow", 1: "killed", 2: "slow"})
    of.processes[1].join(30)
    since = time.monotonic()
    codes, words = of.ended()
    assert codes == [6, -signal.SIGKILL, 6]
    assert time.monotonic() - since < 20
    for said in (words[0], words[2]):
        assert f"rank 1 of 3 ({socket.gethostname()}) failed: no sign of life for 4 s" in said
    assert not (tmp_path / "dst").exists()
    kept = finished_before(tmp_path)
    assert kept

    again = Ranks(context, tmp_path, 2)
    assert again.ended() == ([0, 0], ["done"] * 2)
    assert tree(tmp_path / "dst") == WHOLE
    assert set.union(*again.made()) == set(range(8)) - kept


def test_an_error_of_one_rank_is_told_to_the_others_and_one_process_goes_on(tmp_path, context):
    of = Ranks(context, tmp_path, 2, {0: "slow", 1: "raises"})
    codes, words = of.ended()
    assert codes == [6, 4]
    assert words[1] == "model.bin: damaged"
    assert words[0].startswith(f"rank 1 of 2 ({socket.gethostname()}) failed: model.bin: damaged\n")
    kept = finished_before(tmp_path)
    source = Source(PLAN)
    run(tmp_path / "dst", PLAN, source)
    assert tree(tmp_path / "dst") == WHOLE
    assert {key // 100 for key, _, _ in source.calls} == set(range(8)) - kept


def test_an_error_of_rank_0_which_holds_the_store_is_told_too(tmp_path, context):
    codes, words = Ranks(context, tmp_path, 2, {0: "full", 1: "slow"}).ended()
    assert codes[1] == 6
    assert "rank 0 of 2" in words[1]
    assert "No space left" in words[1]


def test_a_rank_with_another_plan_is_named(tmp_path, context):
    codes, words = Ranks(context, tmp_path, 2, identities={1: "another identity"}).ended()
    assert codes == [6, 2]
    for said in words:
        assert "plans another identity, and rank 0 plans identity 8 0" in said
    assert sorted(os.listdir(tmp_path)) == ["log0"]


def test_sigterm_ends_all_ranks_and_keeps_what_is_there(tmp_path, context):
    of = Ranks(context, tmp_path, 2, {0: "slow", 1: "slow"})
    of.wait_for("slow-*")
    since = time.monotonic()
    of.processes[1].terminate()
    codes, words = of.ended()
    assert codes == [6, 6]
    assert time.monotonic() - since < 10
    for said in words:
        assert "rank 1 of 2" in said
        assert "ended by SIGTERM" in said
    again = Ranks(context, tmp_path, 1)
    assert again.ended() == ([0], ["done"])
    assert tree(tmp_path / "dst") == WHOLE


def test_a_frozen_rank_0_ends_the_others(tmp_path, context):
    """It holds the store, whose calls then never return."""
    of = Ranks(context, tmp_path, 2, {0: "stopped", 1: "slow"})
    of.wait_for("stopped-*")
    codes, words = of.ended(1)
    assert codes == [6]
    assert "rank 1 of 2" in words[0]
    assert "lost the other ranks at 127.0.0.1" in words[0]
    of.processes[0].kill()
    of.processes[0].join(10)


def test_a_rank_that_is_stuck_ends_itself_and_the_others(tmp_path, context):
    codes, words = Ranks(context, tmp_path, 2, {0: "slow", 1: "hangs"}).ended()
    assert codes == [6, 6]
    assert "rank 1 of 2" in words[0]
    assert "not a byte was read or written for" in words[0]


@pytest.mark.slow
def test_under_torchrun_a_killed_rank_ends_the_others_in_order(tmp_path):
    (tmp_path / "log").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONWARNINGS": "ignore",
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", rank_cases.__file__, tmp_path,
    ]  # fmt: skip
    first = subprocess.run(
        [*command, "1=killed", "0=slow"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert first.returncode == 1
    assert "ended by SIGTERM" in (tmp_path / "log" / "0").read_text()
    kept = finished_before(tmp_path)
    source = Source(PLAN)
    run(tmp_path / "dst", PLAN, source)
    assert tree(tmp_path / "dst") == WHOLE
    assert {key // 100 for key, _, _ in source.calls} == set(range(8)) - kept


def test_ranks_that_do_not_meet_say_where(tmp_path, context):
    of = Ranks(context, tmp_path, 2, {0: "early"}, started=[0])
    codes, words = of.ended()
    assert codes == [6]
    assert f"did not meet the other ranks at 127.0.0.1:{of.port}" in words[0]


def test_a_directory_that_other_ranks_do_not_see_is_no_shared_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_staging, "VISIBLE_SECONDS", 0.1)
    with pytest.raises(EnvironmentFailedError, match="made by rank 0, and not to be seen from rank 1"):
        RankStaging.join(tmp_path / "dst", "i", what="a test", world=World(1, 2), token="t")
    assert os.listdir(tmp_path) == []


def test_a_rank_of_an_earlier_run_that_is_still_at_work_is_waited_for(tmp_path):
    with Staging.open(tmp_path / "dst", "i", what="a test") as staging:
        left = Journal.open(staging.path / ".ckptguard-journal.3")
    with pytest.raises(UsageError, match="another process is writing there"):
        Staging.open(tmp_path / "dst", "i", what="a test")
    left.close()
    Staging.open(tmp_path / "dst", "i", what="a test").close()


def test_the_space_for_all_ranks_is_asked_for_at_once(tmp_path):
    with (
        RankStaging.open(tmp_path / "dst", "i", what="a test") as staging,
        pytest.raises(EnvironmentFailedError, match="bytes are needed"),
    ):
        staging.prepare({"a": 1 << 60, "b": 1 << 60})


def test_a_rank_leaves_files_of_others_alone(tmp_path):
    of = plan(2)
    with RankStaging.open(tmp_path / "dst", of.identity, what="a test") as staging:
        for name in ("mine", "its"):
            (staging.path / name).write_bytes(b"cut")
        assert staging.resume({"mine": 10}) == {}
        assert sorted(os.listdir(staging.path)) == [".ckptguard-journal", "its"]
