"""The commands as a user runs them: output, JSON, exit codes; and that help is there and quick to come."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from ckptguard.cli.main import cli, run

REPOSITORY = Path(__file__).resolve().parents[2]
DENSE = REPOSITORY / "fixtures" / "megatron-0.19" / "dense_tp2pp2_dp_reshardable"
MOE = REPOSITORY / "fixtures" / "megatron-0.19" / "moe_pp2ep2_fully_reshardable"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(MOE, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = run([str(w) for w in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_round_of_commands(ckpt: Path, capsys, tmp_path: Path) -> None:
    code, out, _ = call(capsys, "inspect", ckpt)
    assert code == 0
    assert all(text in out for text in ("torch_dist", "fully_reshardable", "509,504", "PP 2", "EP 2", "router.weight"))
    code, out, _ = call(capsys, "fingerprint", ckpt, "-o", tmp_path / "f.json")
    assert code == 0
    assert "whole root" in out
    code, out, _ = call(capsys, "seal", ckpt, "-o", tmp_path / "kept.zst")
    assert code == 0
    seal = next(line for line in out.splitlines() if line.startswith("seal ")).split()[1]
    for against in (seal, tmp_path / "kept.zst", tmp_path / "f.json"):
        code, out, err = call(capsys, "verify", ckpt, "--against", against)
        assert (code, err) == (0, ""), out
        assert "whole" in out
    assert call(capsys, "verify", ckpt, "--quick")[0] == 0
    assert call(capsys, "diff", ckpt, MOE)[0] == 0
    code, _, err = call(capsys, "seal", ckpt)
    assert code == 2
    assert "--replace" in err


def test_damage_exits_4_and_difference_3(ckpt: Path, capsys) -> None:
    assert call(capsys, "seal", ckpt)[0] == 0
    file = ckpt / "iter_0000004" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, out, _ = call(capsys, "verify", ckpt)
    assert code == 4
    assert "__0_0.distcp: block" in out
    assert "(rank 0)" in out
    code, out, _ = call(capsys, "verify", ckpt, "--json")
    assert code == 4
    value = json.loads(out)
    assert value["damaged"]
    assert value["problems"][0]["rank"] == "0"
    assert call(capsys, "diff", ckpt, MOE)[0] in (0, 3)


def test_json_is_one_object(ckpt: Path, capsys) -> None:
    for words in (
        ["inspect", ckpt],
        ["inspect", ckpt, "--tensors", "*router*"],
        ["fingerprint", ckpt],
        ["diff", ckpt, MOE],
    ):
        code, out, err = call(capsys, *words, "--json")
        assert (code, err) == (0, "")
        assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["inspect", "no/such/deep/path"], 4, "no such file or directory"),
        (["inspect", "."], 4, "not torch_dist: no metadata.json"),
        (["inspect", MOE, "--tensors", "nothing.*"], 2, "matches none"),
        (["inspect", MOE, "--step", "9"], 2, "--step says 9"),
        (["verify", MOE, "--against", "zz"], 2, "neither a seal"),
        (["verify"], 2, "Missing argument"),
        (["diff", MOE, DENSE, "--bogus"], 2, "No such option"),
    ],
)
def test_clear_errors(words, code: int, text: str, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = call(capsys, *words)
    assert found == code
    assert text in " ".join(err.split())
    assert "Traceback" not in err + out


def test_errors_as_json(capsys) -> None:
    code, out, _ = call(capsys, "inspect", "no/such/deep/path", "--json")
    assert code == 4
    assert json.loads(out)["error"]["exit_code"] == 4


def test_bin_files_are_refused(tmp_path: Path, capsys) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    code, _, err = call(capsys, "inspect", tmp_path)
    assert code == 5
    assert "safe_serialization" in err


def test_every_command_has_help_and_every_option_too() -> None:
    for name, command in cli.commands.items():
        assert command.help, name
        assert command.get_short_help_str(), name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, (name, parameter.name)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ckptguard.cli.main import run; run(['--help']); run(['verify', '-h']);"
        "heavy = {'torch', 'numpy', 'numba', 'rich', 'megatron', 'transformers', 'blake3', 'yaml'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inspect_and_verify_import_no_torch() -> None:
    code = (
        "import sys; from ckptguard.cli.main import run;"
        f"assert run(['inspect', {str(MOE)!r}]) == 0; assert run(['verify', {str(MOE)!r}]) == 0;"
        "assert run(['fingerprint', sys.argv[1]]) == 0; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(DENSE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys) -> None:
    code, out, _ = call(capsys, "completion", shell)
    assert code == 0
    assert "_CKPTGUARD_COMPLETE" in out


def test_completion_completes() -> None:
    environment = os.environ | {
        "_CKPTGUARD_COMPLETE": "bash_complete",
        "COMP_WORDS": "ckptguard fin",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "ckptguard"], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert "fingerprint" in done.stdout


def test_progress_is_shown_on_a_terminal_only() -> None:
    parent, child = pty.openpty()
    words = [sys.executable, "-m", "ckptguard", "fingerprint", str(MOE), "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=child, check=False)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(parent)
    assert done.returncode == 0
    assert b"fingerprinting" in shown
    assert json.loads(done.stdout)


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m ckptguard fingerprint {MOE} | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_interrupt_exits_130(monkeypatch, capsys) -> None:
    from ckptguard.formats import registry

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "open_checkpoint", stop)
    assert call(capsys, "inspect", MOE)[0] == 130
