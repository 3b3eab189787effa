"""Which node a process stands for, by options, launch lines, torchrun's, Kubernetes' and Slurm's variables."""

from __future__ import annotations

import dataclasses
import re
import shlex
import socket

import pytest

from ckptguard.core.errors import EnvironmentFailedError, UsageError
from ckptguard.megatron.launch_line import understand
from ckptguard.view import addresses
from ckptguard.view.addresses import of_interface, own_address
from ckptguard.view.node_sources import host_names
from ckptguard.view.nodes import Given, Nodes, here, ranks_of

LM = "pretrain_gpt.py --num-layers 4 --train-iters 10"
STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "localhost,node02", "SLURM_NTASKS_PER_NODE": "1",
}  # fmt: skip


def _here(line: str | None = None, env: dict[str, str] | None = None, **given: object) -> Nodes:
    parsed = understand(shlex.split(line)) if line else None
    return here(Given(**given), parsed, env or {}, timeout_seconds=0.1)


def _ranks(nodes: Nodes) -> list[tuple[int, ...]]:
    return [nodes.ranks[node] for node in range(nodes.count)]


def test_nothing_said_is_a_single_node_whose_ranks_are_not_known() -> None:
    nodes = _here()
    assert (nodes.number, nodes.count, nodes.rendezvous, nodes.address) == (0, 1, "", "127.0.0.1")
    assert _ranks(nodes) == [()]
    assert nodes.host == socket.gethostname()


@pytest.mark.parametrize(
    ("line", "env", "each"),
    [
        (f"torchrun --nproc-per-node 4 {LM}", {}, 4),
        (f"torchrun --standalone --nproc_per_node=2 --nnodes 4 {LM}", {}, 2),
        (f"torchrun {LM}", {"PET_NPROC_PER_NODE": "3"}, 3),
        (f"bash -c 'torchrun --nproc-per-node $GPUS {LM}'", {"GPUS": "8"}, 8),
        (f"python {LM}", {}, 1),
        (f"mpirun -np 8 python {LM}", {}, 8),
        (f"srun -N 1 -n 8 python {LM}", {"SLURM_NNODES": "1"}, 8),
        ("bash run.sh", {}, None),
        ("bash run.sh", {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"}, 4),
        (None, {"SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "8"}, 8),
        (None, {"SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1"}, None),
    ],
)
def test_ranks_of_a_single_node(line: str | None, env: dict[str, str], each: int | None) -> None:
    nodes = _here(line, env)
    assert nodes.count == 1
    assert _ranks(nodes) == [tuple(range(each)) if each else ()]


# line, variables, node, count, ranks per node, where they meet
SEVERAL = [
    (
        f"torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr 127.0.0.1 --master-port 6000 {LM}",
        {}, 1, 2, 4, "127.0.0.1:6001",
    ),
    (f"torchrun --nnodes=3 --node_rank=2 --master_addr=127.0.0.1 {LM}", {}, 2, 3, 1, "127.0.0.1:29501"),
    (f"torchrun --nnodes 2 --node-rank 0 --rdzv-endpoint 127.0.0.1:65535 {LM}", {}, 0, 2, 1, "127.0.0.1:65534"),
    (f"torchrun --nnodes 2 --node-rank 0 --rdzv-endpoint [::1]:77 {LM}", {}, 0, 2, 1, "[::1]:78"),
    (
        f"python -m torch.distributed.run --nnodes 2 --node-rank 1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1 {LM}",
        {}, 1, 2, None, "127.0.0.1:29401",
    ),
    (
        f"bash -c 'torchrun --nnodes $SLURM_NNODES --node-rank ${{SLURM_NODEID}} --master-addr $HEAD --nproc-per-node 8 {LM}'",
        {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "HEAD": "127.0.0.1"}, 1, 2, 8, "127.0.0.1:29501",
    ),
    (
        f"torchrun {LM}",
        {"PET_NNODES": "2:2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_NPROC_PER_NODE": "2"},
        1, 2, 2, "127.0.0.1:29501",
    ),
    # as the training operator of Kubernetes sets them: RANK counts pods, WORLD_SIZE processes
    (
        None,
        {
            "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "RANK": "1", "WORLD_SIZE": "8",
            "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "23456", "MASTER_ADDR": "elsewhere",
        },
        1, 2, 4, "127.0.0.1:23457",
    ),
    (None, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 1, 2, None, "127.0.0.1:29501"),
    (f"python {LM}", {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 1, 2, 1, "127.0.0.1:29501"),
    (
        None,
        {"GROUP_RANK": "0", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "500"},
        0, 2, None, "127.0.0.1:501",
    ),
    (None, {**STEP, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "500"}, 1, 2, None, "127.0.0.1:501"),
    (None, {**STEP, "MASTER_ADDR": "127.0.0.1", "SLURM_NTASKS_PER_NODE": "8"}, 1, 2, 8, "127.0.0.1:29501"),
    (
        f"torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend static {LM}",
        {**STEP, "MASTER_ADDR": "127.0.0.1"}, 1, 2, 4, "127.0.0.1:29501",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "env", "number", "count", "each", "meets"), SEVERAL)
def test_several_nodes(
    line: str | None, env: dict[str, str], number: int, count: int, each: int | None, meets: str
) -> None:
    nodes = _here(line, env)
    assert (nodes.number, nodes.count, nodes.rendezvous) == (number, count, f"tcp://{meets}")
    blocks = [tuple(range(n * each, (n + 1) * each)) if each else () for n in range(count)]
    assert _ranks(nodes) == blocks
    assert meets in nodes.notes[0]
    assert any("all files" in note for note in nodes.notes) == (each is None)
    assert nodes.address == ("::1" if "::1" in meets else "127.0.0.1")


def test_slurm_nodes_meet_at_the_first_of_the_step_and_agree_on_a_port() -> None:
    nodes = _here(env=STEP)
    host, port = nodes.rendezvous.removeprefix("tcp://").split(":")
    assert host == "localhost"
    assert int(port) in range(16384, 24576)
    first = _here(env=STEP | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"})
    assert first.rendezvous == nodes.rendezvous
    assert _here(env=STEP | {"SLURM_STEP_ID": "2"}).rendezvous != nodes.rendezvous


def test_options_come_first() -> None:
    line = f"torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr gone {LM}"
    nodes = _here(line, meeting="127.0.0.1:4444", address="10.1.2.3")
    assert (nodes.rendezvous, nodes.address, nodes.notes) == ("tcp://127.0.0.1:4444", "10.1.2.3", ())
    nodes = _here(None, STEP, count=3, number=2, meeting="127.0.0.1:4444", ranks_each=2)
    assert (nodes.number, nodes.count, nodes.ranks[2]) == (2, 3, (4, 5))
    assert _here(None, {"SLURM_NNODES": "4", "SLURM_NODEID": "0"}, count=1).count == 1
    assert dict(_here(None, STEP, meeting="127.0.0.1:4444", ranks="0,2/1,3").ranks) == {0: (0, 2), 1: (1, 3)}


def test_the_order_of_a_c10d_rendezvous_is_not_known_before_it() -> None:
    line = f"torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:1 {LM}"
    nodes = _here(line, number=1)
    assert _ranks(nodes) == [(), ()]
    assert "c10d" in nodes.notes[-1]
    assert _ranks(_here(line, number=1, ranks="2-3/0-1")) == [(2, 3), (0, 1)]


REFUSED = [
    (f"torchrun --nnodes 2 --node-rank 1 --master-addr h {LM}", {}, {"count": 4}, "--nodes is 4, and torchrun"),
    (f"torchrun --nnodes 2 --node-rank 1 --master-addr h {LM}", {}, {"number": 0}, "--node-rank is 0, and torchrun"),
    (f"torchrun --nproc-per-node 2 {LM}", {}, {"ranks_each": 4}, "--ranks-per-node is 4"),
    (f"torchrun --nnodes 2 --node-rank 2 --master-addr h {LM}", {}, {}, "node 2 of 2"),
    (f"torchrun --nnodes 2 {LM}", {}, {"number": 0}, "where the nodes meet is not known"),
    (f"torchrun --nnodes 2 --master-addr h {LM}", {}, {}, "which of them this is is not known"),
    (f"torchrun --nnodes 2 --node-rank 0 --master-addr h --master-port 70000 {LM}", {}, {}, "port '70000'"),
    (f"srun -N 2 torchrun --nnodes 2 {LM}", {}, {"count": 2, "number": 0, "meeting": "h:1"}, "srun in the launch line"),
    (f"srun -N 2 --ntasks-per-node 8 python {LM}", {}, {"number": 0, "meeting": "h:1"}, "srun in the launch line"),
    (None, STEP | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9"}, {}, "one task per node"),
    (None, STEP | {"SLURM_PROCID": "0"}, {}, "one task per node"),
    (None, {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, {}, "one of them alone"),
    (None, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "2"}, {}, "LOCAL_WORLD_SIZE is 2"),
    (None, {"RANK": "x", "WORLD_SIZE": "2"}, {}, "RANK is 'x'"),
    (None, {}, {"count": 2}, "which of them this is is not known"),
    (None, {}, {"count": 2, "number": 0}, "--rdzv HOST:PORT"),
    (None, {}, {"count": 2, "number": 0, "meeting": "h"}, "not of the form host:port"),
    (None, {}, {"count": 2, "number": 0, "meeting": "h:99999"}, "not of the form host:port"),
    (None, {}, {"count": 2, "number": 0, "meeting": "127.0.0.1:9", "interface": "nope0"}, "--interface nope0"),
    (None, {}, {"ranks": "0-3", "ranks_each": 4}, "both given"),
    (None, {}, {"number": 1}, "node 1 of 1"),
]


@pytest.mark.parametrize(("line", "env", "given", "said"), REFUSED)
def test_contradictions_are_refused(line: str | None, env: dict[str, str], given: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        _here(line, env, **given)
    assert caught.value.next_step


@pytest.mark.parametrize("text", ["0-3", "0-3/5-6", "0-3/3-4", "a/b", "0-3/", "1-2/3"])
def test_ranks_that_are_not_those_of_two_nodes(text: str) -> None:
    with pytest.raises(UsageError, match="--ranks"):
        ranks_of(text, 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node07", ["node07"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("a[1-2]b[3,4]c", ["a1b3c", "a1b4c", "a2b3c", "a2b4c"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_host_lists_of_slurm(text: str, names: list[str]) -> None:
    assert list(host_names(text)) == names


def test_a_broken_host_list_is_refused() -> None:
    with pytest.raises(UsageError, match="not a list of hosts"):
        list(host_names("node[a-b]"))


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1", 9, 1) == "127.0.0.1"
    assert own_address("localhost", 9, 1) in ("127.0.0.1", "::1")
    assert of_interface("lo") == "127.0.0.1"
    asked: list[tuple[object, ...]] = []

    def source(target: tuple[int, tuple[object, ...]], host: str) -> str:
        asked.append(target[1])
        return "127.0.1.1" if len(asked) == 1 else "10.0.0.5"

    monkeypatch.setattr(addresses, "_source_address", source)
    monkeypatch.setattr(addresses, "_resolved", lambda *_: (socket.AF_INET, ("127.0.1.1", 9)))
    assert own_address("node0", 9, 1) == "10.0.0.5", "a name that stands for a loopback address on its own machine"
    assert asked[1][0] == "192.0.2.1"


def test_an_unknown_name_is_waited_for_and_named() -> None:
    with pytest.raises(EnvironmentFailedError, match=r"no-such-host\.invalid, where the nodes meet, is not known"):
        _here(None, {}, count=2, number=1, meeting="no-such-host.invalid:9")


def test_nodes_without_ranks_get_all_files() -> None:
    nodes = _here(None, {}, count=2, number=0, meeting="127.0.0.1:9", ranks_each=2).without_ranks(
        "the layout is hidden"
    )
    assert _ranks(nodes) == [(), ()]
    assert dataclasses.replace(nodes).notes[-1] == "every node gets all files: the layout is hidden"
