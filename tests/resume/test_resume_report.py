"""The screen and the JSON of verify-resume, from hand-made results."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import PurePosixPath

import click
import pytest
import verifications

from ckptguard.core.errors import DamagedError, UnsupportedError
from ckptguard.report.resumes import from_json, screen, to_json
from ckptguard.report.words import numbers, value_text
from ckptguard.resume.results import Curve, Verification

FOLDER = PurePosixPath("/runs/report")


def shown(verification: Verification, width: int = 100) -> list[str]:
    return [click.unstyle(line) for line in screen(verification, FOLDER, width)]


@pytest.mark.parametrize("name", verifications.ALL)
def test_one_screen(name: str) -> None:
    found = verifications.ALL[name]()
    lines = shown(found)
    assert lines[0].lower().startswith(f"{found.word}: ")
    assert 20 <= len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert lines[-2].endswith("/runs/report/report.html")
    assert lines[-1].endswith("/runs/report/report.json")
    text = "\n".join(lines)
    for said in (*found.unobserved, *(f"{group} {count}" for group, count in found.observed)):
        assert said.replace("\n", " ") in " ".join(text.split())
    assert all(f"{arm.seconds:.1f} s" in text for arm in found.arms)


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_terminals(width: int) -> None:
    assert max(map(len, shown(verifications.module_fault(), width))) <= width


def test_where_no_reports_were_written() -> None:
    assert "report.html" not in "\n".join(screen(verifications.equal(), None, 100))


def test_a_state_fault_is_named() -> None:
    text = " ".join("\n".join(shown(verifications.state_fault())).split())
    assert "first state as loaded after step 10, rank 1: rng tracker expert-parallel-rng" in text
    assert "save #5d27cff2… uint8[5056] load #49f2733c… uint8[5056]" in text
    assert "differ rng 2 (ranks 1, 3 of 4, in this event)" in text
    assert "agree counter 8, master 112," in text
    assert "culprit state: rng tracker expert-parallel-rng (rank 1, step 10) restored alone from save" in text
    assert "known NVIDIA/Megatron-LM#6858: Expert-parallel ranks" in text
    assert "remedy: Use a Megatron Core" in text
    assert "reference with resume steps 11 to 20 9,640 values different from step 11 on" in text
    assert "excused cpu-rng-offset, 88 values of rng torch cpu: DataLoader draws" in text  # once, for both comparisons


def test_an_operation_is_named() -> None:
    text = " ".join("\n".join(shown(verifications.module_fault())).split())
    assert "reference 6.146692276000977 #" in text
    assert "resume 6.146692752838135 #" in text
    assert "op: aten.mm.default in chunk 0 decoder.layers.1.mlp.linear_fc2" in text


def test_a_failed_arm_shows_its_log_without_obeying_it() -> None:
    failed = verifications.failed_arm()
    *arms, last = failed.arms
    last = dataclasses.replace(last, last_lines=("\x1b]0;owned\x07\x1b[31mboom\x1b[0m\ttab\rover", "x" * 400))
    lines = shown(dataclasses.replace(failed, arms=(*arms, last)))
    text = "\n".join(lines)
    assert "failed      resume: ended with exit code 1" in text
    assert "boom    tab over" in text
    assert "log: /runs/verify/2026-01-31/resume/log.txt" in text
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert max(map(len, lines)) <= 100


def test_an_arm_that_was_stopped() -> None:
    found = verifications.failed_arm()
    stopped = dataclasses.replace(found.arms[-1], exit_code=None, problem="still ran after 600 s", last_lines=())
    assert "stopped by the clock" in "\n".join(shown(dataclasses.replace(found, arms=(*found.arms[:-1], stopped))))


def test_much_is_cut_and_said() -> None:
    found = verifications.state_fault()
    arms = tuple(dataclasses.replace(found.arms[0], name=f"reference (modules, step {n})") for n in range(30))
    many = dataclasses.replace(
        found, arms=arms, comparisons=found.comparisons * 9, culprits=found.culprits * 9, known=found.known * 9,
        unobserved=tuple(f"thing {n}" for n in range(99)), settings=verifications.not_deterministic().settings * 9,
    )  # fmt: skip
    lines = shown(many)
    assert len(lines) <= 54
    text = "\n".join(lines)
    assert "and 23 more in the report" in text
    assert "and 97 more in the report" in text


@pytest.mark.parametrize("name", verifications.ALL)
def test_json_gives_the_same_back(name: str) -> None:
    found = verifications.ALL[name]()
    text = json.dumps(to_json(found), allow_nan=False)
    assert from_json(json.loads(text)) == found


def test_json_keys_are_the_documented_ones() -> None:
    value = to_json(verifications.state_fault())
    assert list(value) == ["format", *(field.name for field in dataclasses.fields(Verification))]
    assert value["format"] == "ckptguard-verify-resume/1"
    assert all(f"``{key}``" in (to_json.__doc__ or "") for key in value)
    first = value["comparisons"][2]["first"]
    assert first["item"] == "rng tracker expert-parallel-rng"
    assert list(first) == ["kind", "step", "rank", "item", "group", "one", "other"]


def test_numbers_that_are_not_finite_go_through_json() -> None:
    points = ((1, math.nan), (2, math.inf), (3, -math.inf), (4, 0.1))
    found = dataclasses.replace(verifications.equal(), curves=(Curve("resume", "loss lm loss", points),))
    back = from_json(json.loads(json.dumps(to_json(found), allow_nan=False)))
    assert str(back.curves) == str(found.curves)


def test_other_json_is_refused() -> None:
    good = json.loads(json.dumps(to_json(verifications.state_fault())))
    for bad in ([], {}, None, {"format": None} | {}, good | {"arms": 3}, {k: v for k, v in good.items() if k != "chain"},
                good | {"comparisons": [{}]}):  # fmt: skip
        kind = UnsupportedError if isinstance(bad, dict) and bad.get("format", "") is None else DamagedError
        with pytest.raises(kind, match=r"x\.json"):
            from_json(bad, "x.json")
    with pytest.raises(UnsupportedError, match="ckptguard-verify-resume/2"):
        from_json(good | {"format": "ckptguard-verify-resume/2"})


def test_values_in_short() -> None:
    digest = "#" + "0123456789abcdef" * 2
    assert value_text(None) == "absent"
    assert value_text(f"{digest} bfloat16[64, 32]") == "#01234567… bfloat16[64, 32]"
    assert value_text(f"{digest} float32[] -0.0") == "-0.0 #01234567… float32[]"
    assert value_text(f"#b3:{digest[1:]}") == "#b3:01234567…"
    assert value_text({"b": 1, "a": [True, None]}) == '{"a": [true, null], "b": 1}'
    assert value_text("x" * 100, 10) == "x" * 9 + "…"
    assert value_text(-0.0) == "-0.0"


def test_numbers_in_words() -> None:
    assert numbers([]) == ""
    assert numbers([5, 3, 4, 0, 1, 9, 9]) == "0, 1, 3 to 5, 9"
