"""How layers are cut into stages, by hand."""

from __future__ import annotations

import pytest

from ckptguard.layout.layouts import Layout
from ckptguard.layout.stages import cut_pattern, virtual_stages, written_out


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|t*4,L", ["Ettt", "ttttL"]),
        ("E(t|)*3tL", ["Et", "t", "t", "tL"]),
        ("E|*2(tt|)*2L", ["E", "", "tt", "tt", "L"]),
        ("EtL", ["EtL"]),
    ],
)
def test_layouts_are_written_out(text: str, stages: list[str]) -> None:
    assert written_out(text) == stages


@pytest.mark.parametrize(
    ("pattern", "layout", "cut", "virtual"),
    [
        ("M-M*", Layout(), "M-M*", 1),
        ("M-|M*/MM", Layout(tp=2), "M-M*/MM", 1),
        ("M-M*/MM", Layout(pp=2), "M-|M*/MM", 1),
        ("M-M|*", Layout(pp=2), "M-M|*", 1),  # it has its two stages
        ("M-M|*", Layout(pp=2, last_pp_layers=2), "M-|M*", 1),
        ("M-M|*", Layout(pp=2, vpp=2), "M|-|M|*", 2),
        ("MM--MM**", Layout(pp=2, vpp=2, first_pp_layers=2, last_pp_layers=6), "M|M--|M|M**", 2),
        ("M-M*", Layout(pp=2, pp_layout="M|-|M|*"), "M|-|M|*", 2),
        ("M-M*MM", Layout(pp=4, first_pp_layers=1, last_pp_layers=1), "M|-M|*M|M", 1),
    ],
)
def test_patterns_say_their_stages(pattern: str, layout: Layout, cut: str, virtual: int) -> None:
    assert cut_pattern(pattern, layout) == cut
    assert virtual_stages(layout, pattern) == virtual
