"""Megatron-Bridge's loop: the installed source has all that is relied on, and a real run is recorded and resumed."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ckptguard.core.errors import UnsupportedError
from ckptguard.megatron.watch_bridge import STEP_RETURNS, WRAPPED
from ckptguard.megatron.watched_loop import check_names
from ckptguard.resume.orders import VARIABLE, Order
from ckptguard.resume.records import RankRecord, read_arm, same

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "resume" / "pretrain_bridge.py"
SITES = (ROOT / "ckptguard" / "resume" / "site", ROOT / "ckptguard" / "testing" / "cpu_site", ROOT)


def _body(module: str) -> list[ast.stmt]:
    """Statements of an installed module of Bridge, which need not be importable here."""
    found = importlib.util.find_spec("megatron")
    assert found is not None
    path = module.removeprefix("megatron.").replace(".", "/") + ".py"
    file = next(Path(p) / path for p in found.submodule_search_locations or () if (Path(p) / path).is_file())
    return ast.parse(file.read_text()).body


def _functions(module: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in _body(module) if isinstance(node, ast.FunctionDef)}


def _function(module: str, name: str) -> ast.FunctionDef:
    """A function that a module defines or takes from another one of Bridge."""
    if name in (functions := _functions(module)):
        return functions[name]
    (source,) = (
        node.module
        for node in _body(module)
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
    )
    assert source is not None
    return _function(source, name)


def _called(node: ast.AST) -> list[tuple[int, str]]:
    """Line and written name of every call, in the order of the text."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    return sorted((call.lineno, ast.unparse(call.func)) for call in calls)


@pytest.mark.parametrize("module", WRAPPED)
def test_wrapped_functions_are_there(module: str) -> None:
    for name, parameters in WRAPPED[module].items():
        arguments = _function(module, name).args
        known = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)}
        assert set(parameters) <= known, name


def test_setup_loads_before_it_makes_iterators() -> None:
    calls = _called(_functions("megatron.bridge.training.setup")["setup"])
    order = [
        name for _, name in calls if name in ("setup_optimizer", "checkpoint_manager.load", "setup_data_iterators")
    ]
    assert order == ["setup_optimizer", "checkpoint_manager.load", "setup_data_iterators"]


def test_a_step_is_counted_before_it_is_logged() -> None:
    train = _functions("megatron.bridge.training.train")["train"]
    lines = {name: line for line, name in _called(train)}
    (counted,) = (
        n.lineno
        for n in ast.walk(train)
        if isinstance(n, ast.AugAssign) and ast.unparse(n.target).endswith("train_state.step")
    )
    samples = max(
        n.lineno for n in ast.walk(train) if isinstance(n, ast.AugAssign) and "_samples" in ast.unparse(n.target)
    )
    assert lines["wrapped_train_step"] < counted < samples < lines["training_log"]
    assert lines["training_log"] < lines["maybe_synchronize_training_step"] < lines["checkpoint_and_decide_exit"]
    (results,) = (
        n.targets[0]
        for n in ast.walk(train)
        if isinstance(n, ast.Assign)
        and isinstance(n.value, ast.Call)
        and ast.unparse(n.value.func) == "wrapped_train_step"
    )
    assert tuple(ast.unparse(results).strip("()").split(", ")) == STEP_RETURNS


def test_saves_go_through_the_manager_that_setup_returns() -> None:
    functions = _functions("megatron.bridge.training.train")
    assert "checkpoint_manager.save" in [name for _, name in _called(functions["save_checkpoint_and_time"])]
    savers = {name for name, node in functions.items() if any(n.endswith("save_checkpoint") for _, n in _called(node))}
    assert not savers


def test_another_loop_is_refused_by_name() -> None:
    module = types.ModuleType("loop")
    module.train_step = lambda optimizer: None  # type: ignore[attr-defined]
    wanted: dict[str, tuple[str, ...]] = {"train_step": ("optimizer", "global_state"), "training_log": ()}
    with pytest.raises(UnsupportedError, match="no parameter global_state of train_step, no function training_log"):
        check_names(module, wanted, "Do something else.")


def _arm(folder: Path, *overrides: str) -> RankRecord:
    """Launches the script on one rank; returns what it recorded."""
    order = Order(arm=folder.name, folder=str(folder)).write()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SITES)), VARIABLE: str(order)}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *overrides], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return read_arm(folder)[0]


def test_a_real_run_is_recorded_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    saved = f"checkpoint.save={tmp_path / 'checkpoints'}"
    stop = "train.exit_interval=3"
    whole = _arm(tmp_path / "whole", stop, saved, "checkpoint.save_interval=2")
    resumed = _arm(
        tmp_path / "resumed",
        stop,
        f"checkpoint.load={tmp_path / 'checkpoints'}",
        "checkpoint.ckpt_step=2",
        "logger.skip_train_metrics_log=true",
    )

    assert [(e.kind, e.step) for e in whole.events] == [
        ("loaded", 0),
        ("step", 1),
        ("step", 2),
        ("saved", 2),
        ("step", 3),
        ("saved", 3),
    ]
    assert [(e.kind, e.step) for e in resumed.events] == [("loaded", 2), ("step", 3)]
    assert (whole.ended, resumed.ended, whole.unobserved, resumed.unobserved) == (True, True, [], [])
    assert whole.facts["framework"] == "Megatron-Bridge"
    arguments = resumed.facts["arguments"]
    assert (arguments["exit_interval"], arguments["no_load_rng"], arguments["bf16"]) == (3, False, True)

    before, after = whole.events[3].values, resumed.events[0].values
    assert before.keys() == after.keys()
    differing = {name for name in before if not same(before[name], after[name])}
    assert {
        name.removesuffix(" current_iteration").removesuffix(" first_iteration_complete") for name in differing
    } == {"other rerun"}
    assert after["counter iteration"] == 2
    assert after["counter consumed_train_samples"] == 8
    assert after["counter num_floating_point_operations_so_far"] > 0

    one, other = whole.events[4].values, resumed.events[1].values
    groups = {whole.groups[name] for name in one}
    assert {"loss", "gradient", "metric", "batch", "master", "optimizer", "rng", "rng at begin"} <= groups
    assert one.keys() == other.keys()
    assert [name for name in one if not same(one[name], other[name])] == []
