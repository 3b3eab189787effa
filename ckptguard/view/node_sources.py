"""What a launch line and the variables of launchers say of the nodes of a run.

- torchrun: options, and the PET_* variables that it reads for those that are not given (torch/distributed/run.py and
  argparse_util.py ``env``, 2.14). It sets RANK, LOCAL_RANK, GROUP_RANK, GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE itself.
- Kubernetes: the training operator sets the PET_* variables, MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; where no PET_*
  variable is set RANK counts pods.
- Slurm: srun sets SLURM_STEP_NUM_NODES, SLURM_STEP_NODELIST, SLURM_NODEID, SLURM_PROCID; what it sets for tasks per node is
  that of the step, which has one task per node here. sbatch and salloc set SLURM_NNODES and SLURM_NTASKS_PER_NODE.
"""

from __future__ import annotations

import re
import string
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ckptguard.core.errors import UsageError
from ckptguard.megatron.launch_line import LaunchLine
from ckptguard.megatron.run_flags import flag_value

Environment = Mapping[str, str]

_C10D_PORT = 29400  # torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py DEFAULT_PORT
_STATIC_PORT = 29500  # torch/distributed/run.py --master-port
_SLURM_PORTS = range(16384, 24576)  # below what Linux gives out by itself (net.ipv4.ip_local_port_range)
_ONE_EACH = "Start it once per node: srun --ntasks-per-node=1 ckptguard view prepare ..., and torchrun after that."


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one source says; None where it says nothing.

    Attributes:
        source: Its name, for messages.
        number: Which node this is, from 0.
        count: How many nodes there are.
        each: Ranks on every node.
        host: Of node 0.
        port: At which training meets there.
        own_port: At which ckptguard may meet there, since training does not.
        unordered: Which node gets which ranks is found out when training starts.
    """

    source: str
    number: int | None = None
    count: int | None = None
    each: int | None = None
    host: str | None = None
    port: int | None = None
    own_port: int | None = None
    unordered: bool = False


def of_line(line: LaunchLine, env: Environment) -> Said:
    """What a launch line says.

    Raises:
        UsageError: A value that cannot be understood, or several nodes without their number.
    """
    if line.torchrun is not None:
        return _of_torchrun(line.torchrun, env, "torchrun in the launch line")
    if line.wrapper is not None:
        return Said(source=f"what {line.wrapper} starts")
    spread = line.spreads
    if spread:
        return Said(
            source=f"{spread} in the launch line",
            count=line.nodes,
            each=line.world if line.nodes in (None, 1) else None,
        )
    return Said(source="the launch line, which starts one process", each=1)


def refuse_spreading(line: LaunchLine, count: int) -> None:
    """Raises UsageError if the line itself starts processes on other nodes, where nothing was prepared."""
    spread = line.spreads
    if spread and (count > 1 or (line.nodes or 1) > 1):
        raise UsageError(
            f"{spread} in the launch line starts training on other nodes too, and a view is prepared on each node by itself",
            next_step=f"Put ckptguard after {spread}, once per node: srun --ntasks-per-node=1 ckptguard view prepare ... --"
            " torchrun .... Where srun starts every rank, prepare in a step of its own before: srun --ntasks-per-node=1"
            " ckptguard view prepare ... && srun ... --load VIEW.",
        )


def of_variables(env: Environment) -> Said:
    """What variables say; of several kinds the one that is nearest to this process.

    Raises:
        UsageError: Several processes per node, or values that are no numbers.
    """
    _refuse_local_rank(env)
    if "PET_NNODES" in env:
        return _of_torchrun(None, env, "PET_* variables")
    for node, count in (("GROUP_RANK", "GROUP_WORLD_SIZE"), ("GROUP_RANK", "NNODES"), ("NODE_RANK", "NNODES")):
        if node in env and count in env:
            return _numbered(env, node, count)
    if "SLURM_STEP_NUM_NODES" in env or "SLURM_NNODES" in env or "SLURM_JOB_NUM_NODES" in env:
        return of_slurm(env)
    if "RANK" in env and "WORLD_SIZE" in env:
        return _numbered(env, "RANK", "WORLD_SIZE")
    host, port = _master(env)
    return Said(source="variables", host=host, port=port)


def _refuse_local_rank(env: Environment) -> None:
    if (_optional(env, "LOCAL_WORLD_SIZE") or 1) > 1 and "LOCAL_RANK" in env:
        raise UsageError(
            f"LOCAL_WORLD_SIZE is {env['LOCAL_WORLD_SIZE']}: torchrun started several of these processes on this node",
            next_step=_ONE_EACH,
        )


def _numbered(env: Environment, node: str, count: str) -> Said:
    host, port = _master(env)
    return Said(
        source=f"{node} and {count}", number=_number(env, node), count=_number(env, count), host=host, port=port
    )


def _master(env: Environment) -> tuple[str | None, int | None]:
    """Host and port of MASTER_ADDR and MASTER_PORT."""
    if not env.get("MASTER_ADDR"):
        return None, None
    return env["MASTER_ADDR"], _port(env.get("MASTER_PORT") or str(_STATIC_PORT), "MASTER_PORT")


# ---- torchrun ----


def _of_torchrun(options: Sequence[str] | None, env: Environment, source: str) -> Said:
    """Options, and PET_* variables for those that are not given. Without options torchrun is not seen: no default counts."""

    def value(name: str, default: str | None = None) -> str | None:
        found = flag_value(options or (), f"--{name}")
        if found is None:
            found = env.get(f"PET_{name.replace('-', '_').upper()}", default if options is not None else None)
        return None if found is None else string.Template(found).safe_substitute(env)

    each = _ranks_each(value("nproc-per-node", "1"))
    if "--standalone" in (options or ()) or env.get("PET_STANDALONE") == "1":
        return Said(source=source, number=0, count=1, each=each)
    count = _nodes(value("nnodes", "1"))
    static = (value("rdzv-backend") or "static") == "static"
    host, port = _endpoint(value("rdzv-endpoint"), _STATIC_PORT if static else _C10D_PORT, source)
    if static and host is None and (host := value("master-addr")):
        port = _port(value("master-port") or str(_STATIC_PORT), "--master-port")
    number = 0 if count == 1 else _whole(value("node-rank"))
    return Said(
        source=source, number=number, count=count, each=each, host=host, port=port, unordered=not static and count != 1
    )


def _nodes(text: str | None) -> int | None:
    """``4`` or ``4:4``; of an elastic run, ``1:4``, the number is not known."""
    least, _, most = (text or "").partition(":")
    return _whole(least) if most in ("", least) else None


def _endpoint(text: str | None, default_port: int, source: str) -> tuple[str | None, int | None]:
    """``host:port`` of --rdzv-endpoint; the host alone takes torch's port."""
    if not text:
        return None, None
    found = re.fullmatch(r"\s*(\[[^]]+\]|[^:]+)(?::(\d+))?\s*", text)
    if found is None:
        return None, None
    return found[1], _port(found[2] or str(default_port), source)


def _port(text: str, source: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UsageError(f"the port {text!r} of {source} is not one", next_step="Give --rdzv HOST:PORT.")
    return int(text)


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _ranks_each(text: str | None) -> int | None:
    """Ranks that torchrun starts: a number, or ``gpu``, ``cpu``, ``auto`` and the like, which torch counts here."""
    if text is None or text.isdecimal():
        return _whole(text)
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(text))
    except (ValueError, RuntimeError):
        return None


# ---- Slurm ----


def of_slurm(env: Environment) -> Said:
    """What Slurm says of the step that this process belongs to.

    Raises:
        UsageError: Several nodes without a step on all of them, or several tasks on a node.
    """
    step = _optional(env, "SLURM_STEP_NUM_NODES")
    count = step or _optional(env, "SLURM_NNODES") or _optional(env, "SLURM_JOB_NUM_NODES") or 1
    if step is None and count > 1 and "SLURM_STEP_ID" not in env:
        raise UsageError(
            f"this Slurm job has {count} nodes, and ckptguard was started on one of them alone",
            next_step="Start it on all: srun --ntasks-per-node=1 ckptguard view ...; or give --nodes 1 for this one only.",
        )
    number = _number(env, "SLURM_NODEID") if count > 1 else 0
    if step is not None:
        _refuse_tasks(env, count, number)
    # Within a step with one task per node the variable says 1, whatever training gets.
    each = _optional(env, "SLURM_NTASKS_PER_NODE")
    host, port = _master(env)
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return Said(
        source="Slurm",
        number=number,
        count=count,
        each=each if each != 1 else None,
        host=host or (_first_host(env) if count > 1 else None),
        port=port,
        own_port=_SLURM_PORTS[zlib.crc32(job.encode()) % len(_SLURM_PORTS)],
    )


def _refuse_tasks(env: Environment, count: int, number: int) -> None:
    tasks = _optional(env, "SLURM_STEP_NUM_TASKS") or _optional(env, "SLURM_NTASKS") or count
    if tasks != count or _optional(env, "SLURM_PROCID") not in (None, number):
        raise UsageError(
            f"Slurm starts {tasks} tasks on {count} nodes, and this one, task {env.get('SLURM_PROCID', '?')}, is on node"
            f" {number}: one task per node is needed",
            next_step="Start it with srun --ntasks-per-node=1.",
        )


def _first_host(env: Environment) -> str | None:
    """Node 0's name: nodes of a step are numbered as its list has them. srun may have been called on another machine."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return next(iter(host_names(env[name])), None)
    return env.get("SLURM_LAUNCH_NODE_IPADDR")


def host_names(text: str) -> Iterable[str]:
    """The names in a list as Slurm writes it: ``node[01-04,07],gpu3``, also with several brackets in a name.

    Raises:
        UsageError: It is not such a list.
    """
    for name in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", text):
        parts = re.split(r"\[([^\]]*)\]", name)
        yield from ("".join(chosen) for chosen in product(*(
            _range(part, text) if at % 2 else [part] for at, part in enumerate(parts)
        )))  # fmt: skip


def _range(text: str, whole: str) -> list[str]:
    out: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{whole}: not a list of hosts as Slurm writes it", next_step="Give --rdzv HOST:PORT.")
        out += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return out


def _number(env: Environment, name: str) -> int:
    value = env.get(name, "")
    if not value.isdecimal():
        raise UsageError(
            f"the environment variable {name} is {value!r}, not a number",
            next_step="Say which node this is with --nodes, --node-rank and --rdzv.",
        )
    return int(value)


def _optional(env: Environment, name: str) -> int | None:
    return _number(env, name) if env.get(name) else None
