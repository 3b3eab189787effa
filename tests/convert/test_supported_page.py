"""docs/supported.md is what the kept results say, and no architecture is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptguard.megatron.bridges import architectures
from ckptguard.testing.families import FAMILIES

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def test_the_page_is_what_the_kept_results_say() -> None:
    from supported import page, results

    assert page.PAGE.read_text() == page.text(*results.read())


def test_results_are_of_what_is_installed() -> None:
    from supported import results

    versions, kept = results.read()
    assert versions == results.versions()
    assert [result.case for result in kept] == results.cases()


def test_no_architecture_and_no_family_is_left_out() -> None:
    from supported import page

    cells = set(re.findall(r"^\| (.+?) \|", page.PAGE.read_text(), re.MULTILINE))
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    listed |= {f.config["architectures"][0] for f in FAMILIES.values()}
    assert listed >= set(architectures())
    assert {name for name in FAMILIES if name not in cells} == {
        result.case for result in _kept() if result.case in FAMILIES and not result.imported
    }


def test_what_is_not_imported_has_a_reason() -> None:
    for result in _kept():
        assert result.imported == bool(result.layout) == bool(result.round_trip)
        assert result.imported or result.note, result.case
        assert not re.search(r"/tmp|/root|/home|a bug of the attempt", result.note), result.case


def _kept():
    from supported import results

    return results.read()[1]
