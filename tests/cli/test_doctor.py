"""``ckptguard doctor``: what is there, and what is stood in for."""

from __future__ import annotations

import json

from ckptguard.cli.main import run
from ckptguard.megatron import surroundings, te_skeleton


def test_it_says_what_is_there_and_what_is_stood_in_for(capsys):
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "megatron-bridge" in text
    assert "transformer-engine" in text


def test_json_and_exit_code(capsys, monkeypatch):
    monkeypatch.setattr(surroundings, "_version", lambda name: None if name == "megatron-bridge" else "1.0")
    assert run(["doctor", "--json"]) == 6
    said = {p["name"]: p for p in json.loads(capsys.readouterr().out)["packages"]}
    assert said["megatron-bridge"]["version"] is None
    assert "--no-deps" in said["megatron-bridge"]["missing"]


def test_every_package_that_is_stood_in_for_is_listed():
    assert set(surroundings.OPTIONAL) == te_skeleton.ROOTS
