"""Which arms are planned, and what each adds to the line of each framework."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ckptguard.core.errors import UsageError
from ckptguard.megatron.launch_line import framework_of, parse
from ckptguard.megatron.run_flags import Bridge, MegatronLM, Target, flag_value, override_value
from ckptguard.resume.arm_lines import Request, Templates, folder_name, plan_arms, plan_rerun, start_of

_LM = "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --train-iters 100"


def _request(line=_LM, framework=None, **changed) -> Request:
    parsed = parse(shlex.split(line))
    plain = Request(
        line=parsed, framework=framework_of(parsed, framework), steps=20, save_at=(10,), folder="/w", site="/site"
    )
    return dataclasses.replace(plain, **changed)


def _added(request: Request) -> dict[str, str]:
    return {arm.name: shlex.join(arm.added) for arm in plan_arms(request, repeat=True)}


def test_arms_of_a_plain_megatron_line():
    load = "--load /w/save/checkpoints --exit-on-missing-checkpoint"
    assert _added(_request()) == {
        "reference": "--exit-interval 20",
        "repeat": "--exit-interval 20",
        "save": "--exit-interval 10 --save /w/save/checkpoints --save-interval 10",
        "load": f"--exit-interval 11 {load}",
        "resume": f"--exit-interval 20 {load}",
    }


def test_the_users_folders_are_never_written():
    line = (
        f"{_LM} --save /u/ckpt --load /u/ckpt --save-interval 500 --save-retain-interval 1000 --tensorboard-dir=/u/tb"
    )
    line += " --wandb-project p --ckpt-step 7 --non-persistent-save-interval 5 --non-persistent-local-ckpt-dir /u/local"
    for name, added in _added(_request(line)).items():
        words = shlex.split(added)
        total = [*parse(shlex.split(line)).arguments, *words]
        save = flag_value(total, "--save")
        assert save == ("/w/save/checkpoints" if name == "save" else "")
        assert flag_value(total, "--tensorboard-dir") == f"/w/{name}/tensorboard"
        assert flag_value(total, "--wandb-save-dir") == f"/w/{name}/wandb"
        assert flag_value(total, "--non-persistent-local-ckpt-dir") == f"/w/{name}/non-persistent-local"
        assert flag_value(total, "--non-persistent-save-interval") == "0"
        loads = name in ("load", "resume")
        assert flag_value(total, "--load") == ("/w/save/checkpoints" if loads else "/u/ckpt")
        assert flag_value(total, "--ckpt-step") == ("10" if loads else "7")
        assert flag_value(total, "--save-retain-interval") == ("10" if name == "save" else "1000")


def test_what_needs_a_folder_gets_one():
    assert "--save /w/reference/checkpoints" in _added(_request(f"{_LM} --save /u --log-progress"))["reference"]


def test_a_wrapper_gets_all_that_may_stand_in_it():
    added = _added(_request("bash run.sh", "megatron-lm"))
    assert added["reference"] == "--exit-interval 20 --save= --save-interval 20"
    assert added["resume"].endswith("--exit-on-missing-checkpoint --ckpt-step 10")


def test_arms_of_a_bridge_line():
    line = "torchrun run_recipe.py --recipe r train.train_iters=100 checkpoint.save=/u logger.wandb_project=p"
    added = _added(_request(line, folder="/w x"))
    none = "logger.tensorboard_dir=null checkpoint.save=null checkpoint.async_save=false"
    assert added["reference"] == f"train.exit_interval=20 {none} " + shlex.quote(
        "logger.wandb_save_dir='/w x/reference/wandb'"
    )
    load = shlex.quote("checkpoint.load='/w x/save/checkpoints'") + " checkpoint.exit_on_missing_checkpoint=true"
    assert load in added["resume"]
    assert shlex.quote("checkpoint.save='/w x/save/checkpoints'") + " checkpoint.save_interval=10" in added["save"]


def test_arms_of_a_plain_loop():
    templates = Templates(
        "--steps {steps}", "--steps {steps} --stop {save_at} --save '{dir}/a b'", "--load {dir} --steps {steps}"
    )
    request = _request("python train.py", "torch", templates=templates)
    assert _added(request) == {
        "reference": "--steps 20",
        "repeat": "--steps 20",
        "save": "--steps 20 --stop 10 --save '/w/save/checkpoints/a b'",
        "load": "--load /w/save/checkpoints --steps 20",
        "resume": "--load /w/save/checkpoints --steps 20",
    }
    assert plan_rerun(request, "resume", name="again", purpose="", end=12).added[-1] == "12"
    with pytest.raises(UsageError, match=r"(?s)--reference-args.*\{save_at\}"):
        plan_arms(_request("python train.py", "torch"))


def test_steps_are_counted_from_where_the_run_starts():
    request = _request(f"{_LM} --load /u", start=50, steps=20, save_at=(5, 10))
    reference, save, load, resume = plan_arms(request)
    assert [(a.start, a.end) for a in (reference, save, load, resume)] == [(50, 70), (50, 60), (60, 60), (60, 70)]
    assert save.saves == (55, 60)
    assert flag_value(save.added, "--save-interval") == "5"
    assert flag_value(resume.added, "--exit-interval") == "70"
    assert start_of(request.line, "megatron-lm") == ("/u", None)


def test_a_rerun_has_its_own_folder_and_end():
    arm = plan_rerun(_request(), "reference", name="reference (modules, step 11)", purpose="look into step 11", end=11)
    assert arm.folder == f"/w/{folder_name(arm.name)}" == "/w/reference-modules-step-11"
    assert (arm.start, arm.end, arm.role, arm.added) == (0, 11, "reference", ("--exit-interval", "11"))


def test_the_environment_brings_the_recorder_in():
    environment = {"PYTHONPATH": "/theirs", "SLURM_EXPORT_ENV": "NONE"}
    request = _request(
        "srun python pretrain_gpt.py --num-layers 2", environment=environment, added_environment={"NCCL_ALGO": "Ring"}
    )
    reference = dict(plan_arms(request)[0].environment)
    assert reference["PYTHONPATH"] == "/site:/theirs"
    assert reference["CKPTGUARD_RECORD"] == "/w/reference/order.json"
    assert (reference["WANDB_MODE"], reference["NCCL_ALGO"]) == ("offline", "Ring")
    assert "CKPTGUARD_RECORD" in reference["SLURM_EXPORT_ENV"].split(",")


def test_resume_arguments_concern_the_arms_that_load():
    request = _request(
        resume_args=("--pipeline-model-parallel-size", "2", "--no-load-rng"), resume_environment={"A": "1"}
    )
    for arm in plan_arms(request):
        assert ("--no-load-rng" in arm.command) == arm.loads == (("A", "1") in arm.environment)
        assert arm.world == (None if arm.loads else 2)  # another layout may need other processes


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"line": f"{_LM} --finetune --load /u"}, "--finetune: .*--pretrained-checkpoint"),
        ({"line": f"{_LM} --no-load-rng"}, "--no-load-rng"),
        ({"line": f"{_LM} --no-save-optim --skip-train"}, "--no-save-optim.*--skip-train"),
        ({"line": "torchrun t.py model.num_layers=2 checkpoint.finetune=True"}, "checkpoint.finetune=true"),
        ({"steps": 101}, "ends after step 100, before step 101"),
        ({"start": 90}, "before step 110"),
        ({"line": "torchrun t.py --num-layers 2 --train-samples 40 --global-batch-size 4"}, "ends after step 10"),
        ({"line": "torchrun t.py model.num_layers=2 train.train_iters=5"}, "ends after step 5"),
        ({"save_at": ()}, "at least one"),
        ({"save_at": (0,)}, "from 1 on"),
        ({"save_at": (10, 5)}, "increasing order"),
        ({"save_at": (20,)}, "nothing is left to compare"),
    ],
)
def test_what_cannot_be_proved_is_refused(changed, message):
    line = changed.pop("line", _LM)
    with pytest.raises(UsageError, match=message):
        plan_arms(_request(line, **changed))


def test_data_flags_with_reset_in_their_name_are_no_reset():
    assert plan_arms(_request(f"{_LM} --reset-position-ids --reset-attention-mask"))


def test_values_of_flags_and_overrides():
    words = ["--a", "1", "--b", "--a=2", "--c", "-1", "--a"]
    assert [flag_value(words, name) for name in ("--a", "--b", "--c", "--d")] == ["", "", "-1", None]
    assert override_value(["x.y=1", "+x.y='2'"], "x.y") == "2"
    assert override_value(["x.y=1"], "x.z") is None


_ASKS_MEGATRON = """
import argparse, json, sys
from ckptguard.testing import cpu_stand_in
cpu_stand_in.install()
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
parsed = vars(parser.parse_args(json.loads(sys.argv[1])))
names = ("save", "save_interval", "exit_interval", "load", "ckpt_step", "exit_on_missing_checkpoint", "tensorboard_dir",
         "non_persistent_save_interval", "wandb_save_dir")
known = sorted(option for action in parser._actions for option in action.option_strings)
import inspect
from megatron.training import checkpointing, training
decides = inspect.getsource(training.checkpoint_and_decide_exit)
leaves = inspect.getsource(checkpointing._load_base_checkpoint)
print(json.dumps([{n: parsed[n] for n in names}, known, decides, leaves]))
"""


@pytest.mark.megatron
def test_megatron_takes_the_last_of_repeated_flags_and_knows_all_of_them():
    from ckptguard.megatron import run_flags

    user = ["--save", "/u", "--save-interval", "500", "--load", "/u", "--ckpt-step", "3", "--exit-interval", "9"]
    user += ["--tensorboard-dir", "/u/tb", "--non-persistent-save-interval", "5", "--wandb-project", "p"]
    target = Target(stop_at=20, scratch="/w", load_from="/w/c", load_step=10)
    script = [sys.executable, "-c", _ASKS_MEGATRON, json.dumps([*user, *MegatronLM().added(user, target)])]
    done = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr
    parsed, known, decides, leaves = json.loads(done.stdout.splitlines()[-1])
    assert parsed == {
        "save": "", "save_interval": 500, "exit_interval": 20, "load": "/w/c", "ckpt_step": 10,
        "exit_on_missing_checkpoint": True, "tensorboard_dir": "/w/tensorboard", "non_persistent_save_interval": 0,
        "wandb_save_dir": "/w/wandb",
    }  # fmt: skip
    names = {
        *run_flags._LM_REFUSED,
        *run_flags._LM_SAVE_INTERVAL,
        *run_flags._LM_NEEDS_A_FOLDER,
        *run_flags._LM_FOLDERS,
    }
    assert names <= set(known)
    assert "iteration % args.exit_interval == 0" in decides
    assert "if args.save and args.save_interval and" in decides  # an empty --save is never written
    assert "'--exit-on-missing-checkpoint' set ... exiting" in leaves


def _fields(*names: str) -> set[str]:
    """Annotated fields of classes and of their bases, read from Bridge's and Megatron-LM's sources."""
    root = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0]).parent
    files = [*Path(root, "training", "config").glob("*.py"), Path(root, "bridge", "training", "config.py")]
    classes = {}
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    found, waiting, seen = set(), list(names), set()
    while waiting:
        name = waiting.pop().removeprefix("MTrain")
        if name in seen:
            continue
        seen.add(name)
        for node in classes.get(name, ()):
            found |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def test_bridge_knows_all_overrides():
    from ckptguard.megatron import run_flags
    from ckptguard.megatron.launch_line import _BRIDGE_SECTIONS

    sections = {
        "train": "TrainingConfig", "checkpoint": "CheckpointConfig", "logger": "LoggerConfig", "validation": "ValidationConfig",
        "tensor_inspect": "TensorInspectConfig", "ft": "FaultToleranceConfig",
    }  # fmt: skip
    names = {f"{section}.{field}" for section, name in sections.items() for field in _fields(name)}
    target = Target(stop_at=20, scratch="/w", save_to="/w/c", save_every=10, load_from="/w/c", load_step=10)
    added = Bridge().added([f"{name}=1" for name in run_flags._BRIDGE_FOLDERS], target)
    ours = {word.partition("=")[0] for word in added} | {name for name, _ in run_flags._BRIDGE_REFUSED}
    assert ours <= names
    assert _fields("ConfigContainer") >= _BRIDGE_SECTIONS


def test_an_older_save_is_resumed_where_it_is_asked_for():
    request = _request(save_at=(5, 10), resume_from=5)
    arms = {arm.name: arm for arm in plan_arms(request)}
    assert arms["save"].end == 10
    assert arms["save"].saves == (5, 10)
    assert [(arms[name].start, arms[name].end) for name in ("load", "resume")] == [(5, 5), (5, 20)]
    assert flag_value(arms["resume"].added, "--ckpt-step") == "5"
    again = plan_rerun(request, "save", name="save (keeping values)", purpose="", end=5)
    assert (again.end, again.saves, again.checkpoints) == (5, (5,), "/w/save-keeping-values/checkpoints")
    with pytest.raises(UsageError, match="nothing is saved after step 7"):
        plan_arms(_request(save_at=(5, 10), resume_from=7))


def test_checkpoints_may_go_to_a_disk_of_each_node():
    arms = {arm.name: arm for arm in plan_arms(_request(checkpoints="/local/ckpt"))}
    assert flag_value(arms["save"].added, "--save") == flag_value(arms["resume"].added, "--load") == "/local/ckpt"
    assert arms["save"].elsewhere
    assert flag_value(arms["reference"].added, "--save") is None


def test_node_local_arms_load_from_a_view():
    prepare = shlex.join([sys.executable, "-m", "ckptguard", "view", "prepare", "/d", "--view", "/d.view"])
    prepare += " --step 10 --framework megatron-lm --"
    arms = {
        line: {a.name: shlex.join(a.command) for a in plan_arms(_request(line, checkpoints="/d", node_local=True))}
        for line in (_LM, f"srun -N 2 --ntasks-per-node 1 torchrun --nnodes 2 {_LM.partition(' ')[2]}")
    }
    for line, commands in arms.items():
        before = "srun -N 2 --ntasks-per-node 1 " if line.startswith("srun") else ""
        for name in ("load", "resume"):
            assert commands[name].startswith(f"{before}{prepare} torchrun --n"), commands[name]
            assert "--load /d " in commands[name]
        assert "ckptguard" not in commands["save"] + commands["reference"]


@pytest.mark.parametrize(
    "line",
    [
        "srun -n 8 python pretrain_gpt.py --num-layers 2 --train-iters 100",
        "srun -n 8 bash run.sh",
        "bash -c 'srun -n 2 torchrun pretrain_gpt.py --num-layers 2 --train-iters 100'",
        "mpirun -np 8 python pretrain_gpt.py --num-layers 2 --train-iters 100",
    ],
)
def test_a_view_needs_a_command_that_runs_once_on_each_node(line):
    with pytest.raises(UsageError, match="once on each node") as caught:
        plan_arms(_request(line, "megatron-lm", checkpoints="/d", node_local=True))
    assert "torchrun" in caught.value.next_step


def test_node_local_needs_the_nodes_directory():
    with pytest.raises(UsageError, match="where nodes keep"):
        plan_arms(_request(node_local=True))
