"""Launch lines as people write them: what is understood, where flags go, how variables get through."""

from __future__ import annotations

import shlex

import pytest

from ckptguard.core.errors import UsageError
from ckptguard.megatron.launch_line import command_of, framework_of, is_hydra, parse
from ckptguard.megatron.shell_text import commands

_GPT = "pretrain_gpt.py --num-layers 4 --train-iters 100"
_LM = ("pretrain_gpt.py", "megatron-lm")

# line, launchers, script, framework, nodes, world
LINES = [
    (f"torchrun --nproc-per-node 8 {_GPT}", "torchrun", *_LM, 1, 8),
    (f"torchrun --nproc_per_node=8 --nnodes=4 --node_rank 0 --master_addr h0 {_GPT}", "torchrun", *_LM, 4, 32),
    (
        f"torchrun --nnodes 1:4 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint h:1 {_GPT}",
        "torchrun",
        *_LM,
        None,
        None,
    ),
    (f"torchrun --standalone --nproc-per-node 2 -r 3 -t 3 --log-dir a.py {_GPT}", "torchrun", *_LM, 1, 2),
    (
        "torchrun --nproc-per-node 2 -m mypackage.train --train-iters 5",
        "torchrun",
        "mypackage.train",
        "megatron-lm",
        1,
        2,
    ),
    (f"python3.12 -u -m torch.distributed.run --nproc-per-node 2 {_GPT}", "torch.distributed.run", *_LM, 1, 2),
    (
        f"/usr/bin/python -m torch.distributed.launch --nproc_per_node 2 --use_env {_GPT}",
        "torch.distributed.launch",
        *_LM,
        1,
        2,
    ),
    (f"torchrun --nproc-per-node 2 --no-python python -u {_GPT}", "torchrun python", *_LM, 1, 2),
    (f"srun -N2 --ntasks-per-node=4 --container-image x.sqsh python -u {_GPT}", "srun python", *_LM, 2, 8),
    (f"srun --nodes 2 --ntasks 16 --export ALL python {_GPT}", "srun python", *_LM, 2, 16),
    (f"srun -N 2 --ntasks-per-node 1 torchrun --nnodes 2 --nproc-per-node 8 {_GPT}", "srun torchrun", *_LM, 2, 16),
    (
        f"srun -l bash -c 'torchrun --nnodes $SLURM_NNODES --node-rank $SLURM_PROCID {_GPT}'",
        "srun bash torchrun",
        *_LM,
        None,
        None,
    ),
    (f"mpirun -np 8 --map-by ppr:4:node -x LD_LIBRARY_PATH python {_GPT}", "mpirun python", *_LM, None, 8),
    (f"mpiexec.hydra -n 4 -ppn 2 python {_GPT}", "mpiexec.hydra python", *_LM, None, 4),
    ("python -W ignore -X faulthandler train.py --lr 1e-3", "python", "train.py", None, None, None),
    ("python -m my.train", "python", "my.train", None, None, None),
    ("./train.py --x 1", "train.py", "./train.py", None, None, None),
    (
        "uv run torchrun --nproc_per_node=8 run_recipe.py --recipe llama32_1b_pretrain_config train.train_iters=5000",
        "torchrun",
        "run_recipe.py",
        "bridge",
        1,
        8,
    ),
    (
        "torchrun --nproc-per-node 2 train_bridge.py 'checkpoint.save=/x' +model.num_layers=2",
        "torchrun",
        "train_bridge.py",
        "bridge",
        1,
        2,
    ),
    (f"numactl --cpunodebind=0 env A=b python {_GPT}", "python", *_LM, None, None),
    (f"nsys profile -o out.nsys torchrun --nproc-per-node 2 {_GPT}", "torchrun", *_LM, 1, 2),
    ("accelerate launch --num_processes 2 train.py --x", "train.py", "train.py", None, None, None),
    (
        "bash -euo pipefail -lc 'cd /x && export A=1; python prepare.py"
        f" && torchrun --nproc-per-node 2 {_GPT} 2>&1 | tee train.log'",
        "bash torchrun",
        *_LM,
        1,
        2,
    ),
]


@pytest.mark.parametrize(("line", "launchers", "script", "framework", "nodes", "world"), LINES)
def test_a_line_is_understood(line, launchers, script, framework, nodes, world):
    found = parse(shlex.split(line))
    assert (found.launchers, found.script, found.framework) == (tuple(launchers.split()), script, framework)
    assert (found.nodes, found.world, found.wrapper) == (nodes, world, None)


@pytest.mark.parametrize(
    ("line", "wrapper"),
    [
        ("bash run.sh --x 1", "run.sh"),
        ("bash -x /jobs/run.sh", "/jobs/run.sh"),
        ("./run.sh", "./run.sh"),
        ("srun -N 2 ./run.sh", "./run.sh"),
        ("make train", "make"),
        ("bash -c 'source env.sh; ./run.sh 70b'", "./run.sh"),
    ],
)
def test_a_wrapper_hides_the_framework(line, wrapper):
    found = parse(shlex.split(line))
    assert (found.wrapper, found.script) == (wrapper, None)
    with pytest.raises(UsageError, match=r"(?s)cannot be seen.*--framework megatron-lm.*\"\$@\""):
        framework_of(found, None)
    assert framework_of(found, "megatron-lm") == "megatron-lm"


def test_a_framework_is_asked_for_where_nothing_shows_it():
    line = parse(["python", "train.py", "--lr", "1"])
    with pytest.raises(UsageError, match=r"train\.py shows no flag"):
        framework_of(line, None)
    with pytest.raises(UsageError, match="jax: not a framework"):
        framework_of(line, "jax")
    assert framework_of(parse(["python", "train.py", "--num-layers", "2"]), "torch") == "torch"  # what is given wins


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "nothing to start"),
        ("torchrun --nproc-per-node 2", "before it names a script"),
        ("python -I train.py", "python -I"),
        ("torchrun --no-python python -uE train.py", "python -E"),
        ("docker run --gpus all image torchrun train.py", "docker"),
        ("ssh node1 torchrun train.py", "ssh"),
        ("sbatch job.sh", "sbatch"),
        ("bash -c", "no command"),
        ("bash", "neither a script nor -c"),
        ("bash -c \"bash -c 'python train.py'\"", "a shell inside a shell"),
    ],
)
def test_what_cannot_be_recorded_is_refused(line, message):
    with pytest.raises(UsageError, match=message):
        parse(shlex.split(line))
    with pytest.raises(UsageError, match="not closed"):
        parse(["bash", "-c", "python 'train.py"])


ADDED = ("--save", "/a b/c", "--exit-interval", "5")
_ADDED = shlex.join(ADDED)
ENVIRONMENT = {"PYTHONPATH": "/site:/theirs", "CKPTGUARD_RECORD": "/o.json"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"torchrun --nproc-per-node 2 {_GPT}", f"torchrun --nproc-per-node 2 {_GPT} {_ADDED}"),
        ("bash run.sh", f"bash run.sh {_ADDED}"),
        ("srun python t.py", f"srun python t.py {_ADDED}"),
        ("srun --export=ALL,A=1 python t.py", f"srun --export=ALL,A=1 python t.py {_ADDED}"),
        ("srun --export=NONE python t.py", f"srun --export=PYTHONPATH,CKPTGUARD_RECORD python t.py {_ADDED}"),
        (
            "srun --export A,PYTHONPATH=/x python t.py",
            f"srun --export A,PYTHONPATH=/site:/x,CKPTGUARD_RECORD python t.py {_ADDED}",
        ),
        ("srun python t.py --export=NONE", f"srun python t.py --export=NONE {_ADDED}"),
        ("env PYTHONPATH=/x python t.py", f"env PYTHONPATH=/site:/x python t.py {_ADDED}"),
        ("mpirun -np 2 python t.py", f"mpirun -x PYTHONPATH -x CKPTGUARD_RECORD -np 2 python t.py {_ADDED}"),
        (
            "mpirun -x PYTHONPATH=/x python t.py",
            f"mpirun -x CKPTGUARD_RECORD -x PYTHONPATH=/site:/x python t.py {_ADDED}",
        ),
        (
            "mpiexec.hydra -n 2 python t.py",
            f"mpiexec.hydra -genv PYTHONPATH /site:/theirs -genv CKPTGUARD_RECORD /o.json -n 2 python t.py {_ADDED}",
        ),
        (
            "mpirun -genv PYTHONPATH /x python t.py",
            f"mpirun -genv CKPTGUARD_RECORD /o.json -genv PYTHONPATH /site:/x python t.py {_ADDED}",
        ),
        ("python t.py PYTHONPATH=/x", f"python t.py PYTHONPATH=/x {_ADDED}"),
    ],
)
def test_flags_and_variables_are_added(line, expected):
    parsed = parse(shlex.split(line))
    command = command_of(parsed, ADDED, ENVIRONMENT, hydra=is_hydra(parsed, {}))
    assert list(command) == shlex.split(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torchrun t.py --a $X", f"torchrun t.py --a $X {_ADDED}"),
        ("torchrun t.py 2>&1 | tee log.txt", f"torchrun t.py {_ADDED} 2>&1 | tee log.txt"),
        ("torchrun t.py>log", f"torchrun t.py {_ADDED}>log"),
        (
            "cd /x\npython t.py --a 'b; c' \\\n --d e # end\necho done",
            f"cd /x\npython t.py --a 'b; c' \\\n --d e {_ADDED} # end\necho done",
        ),
        ("python t.py --n $(cat n.txt) && touch ok", f"python t.py --n $(cat n.txt) {_ADDED} && touch ok"),
        ("PYTHONPATH=/x:$PYTHONPATH python t.py", f"PYTHONPATH=/site:/x:$PYTHONPATH python t.py {_ADDED}"),
        ('export PYTHONPATH="$PWD"; python t.py', f'export PYTHONPATH="/site:$PWD"; python t.py {_ADDED}'),
    ],
)
def test_flags_go_into_the_text_of_a_shell_before_redirections(text, expected):
    command = command_of(parse(["srun", "bash", "-c", text]), ADDED, ENVIRONMENT)
    assert list(command) == ["srun", "bash", "-c", expected]


def test_a_text_that_passes_its_arguments_on_gets_them_as_such():
    line = parse(["bash", "-c", 'torchrun t.py "$@"', "_", "--num-layers", "2"])
    assert line.arguments == ("--num-layers", "2")
    assert command_of(line, ADDED, {}) == (*line.words, *ADDED)
    without_zero = parse(["bash", "-c", 'torchrun t.py "$@"'])
    assert command_of(without_zero, ADDED, {}) == ("bash", "-c", 'torchrun t.py "$@"', "bash", *ADDED)


def test_intel_mpi_is_known_by_its_variable():
    line = parse(["mpirun", "-n", "2", "python", "t.py"])
    assert is_hydra(line, {"I_MPI_ROOT": "/opt/intel"})
    assert not is_hydra(line, {})
    assert not is_hydra(parse(["mpirun", "--mca", "a", "b", "python", "t.py"]), {"I_MPI_ROOT": "/opt/intel"})


def test_commands_of_a_shell_text():
    text = "a 'b c' \"d $e\" f\\ g `h i` ${j:-k l} $((1 + 2)) <in >>out tail; m&&n|o"
    found = [[word.text for word in command] for command in commands(text)]
    assert found == [["a", "b c", "d $e", "f g", "`h i`", "${j:-k l}", "$((1 + 2))"], ["m"], ["n"], ["o"]]
    for broken in ("a 'b", 'a "b', "a $(b", "a `b", "a ${b"):
        with pytest.raises(ValueError, match=r"not closed|missing"):
            commands(broken)
