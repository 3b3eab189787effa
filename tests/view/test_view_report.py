"""What people and scripts are told of a view: from values alone."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ckptguard.report.views import (
    best_of,
    nodes_line,
    prepared_lines,
    pruned_lines,
    result_dict,
    status_lines,
    view_dict,
)
from ckptguard.view.choosing import Candidate
from ckptguard.view.nodes import Nodes
from ckptguard.view.preparing import Result
from ckptguard.view.pruning import View
from ckptguard.view.records import Publication
from ckptguard.view.values import Agreement, Copy, Delivered, Delivery, Digest, FoundStep, NodeReport, Step

OLD, NEW = Step("global", "20", "aa"), Step("global", "30", "bb")
DATA = [f"iter_0000020/__{rank}_0.distcp" for rank in range(5)]
INDEX = "iter_0000020/.metadata"
NODES = Nodes(number=0, count=3, ranks={0: (0,), 1: (1,), 2: (2,)}, address="10.0.0.1", host="alpha", notes=("a port",))


def _copy(node: int, name: str, place: int = 0) -> Copy:
    return Copy(node, place, name, name, 1024)


def _report(node: int, host: str, found: tuple[FoundStep, ...] = ()) -> NodeReport:
    return NodeReport(node, host, ("/ckpt",), "http://h:1", found=found, free_bytes=5, sees=(node,))


def _result(view: Path | None = Path("/v")) -> Result:
    copies = tuple(_copy(0, name) for name in DATA)
    old = Candidate(
        OLD, {INDEX: (_copy(0, INDEX),)}, {name: (_copy(0, name), _copy(1, name)) for name in DATA}, (DATA[0],), ()
    )
    new = Candidate(NEW, {}, {"iter_0000030/x": ()}, (), ("x: no node has it, and no source", "y: too"), ("node 1: z",))
    digest = Digest(1024, "ff", 512, "0011")
    agreement = Agreement(
        "abc", OLD, 3, ("alpha", "beta", "gamma"), "2026-01-01T00:00:00+00:00", "the load plan of TP2",
        ("iteration 30: x: no node has it",), dict.fromkeys((INDEX, *DATA), digest),
        {
            0: dict.fromkeys((INDEX, *DATA), "linked from /ckpt"),
            1: {INDEX: "fetched from node 0 (alpha)", DATA[1]: "linked from /ckpt"},
        },
    )  # fmt: skip
    return Result(
        agreement,
        view,
        (Delivered(DATA[0], "linked"), Delivered(DATA[1], "fetched", 2048), Delivered(DATA[2], "", problem="lost")),
        ("iteration 30 was passed over",),
        (_report(0, "alpha", (FoundStep(OLD, 0, 0, copies),)), _report(1, "beta"), _report(2, "gamma")),
        (new, old),
        planned=(Delivery(DATA[1], 2, Digest(1024, ""), _copy(0, DATA[1]), 0),),
    )


def _text(lines: object) -> str:
    return click.unstyle("\n".join(lines))  # type: ignore[call-overload]


def test_node_0_shows_what_each_node_has_and_got() -> None:
    text = _text(prepared_lines(_result(), NODES))
    assert text.splitlines() == [
        "/v holds iteration 20",
        "  reads       the load plan of TP2",
        "  agreement   abc, 2026-01-01T00:00:00+00:00",
        "  iteration 30  cannot be whole: x: no node has it, and no source (and 1 more)",
        "    nodes 0 to 2  nothing",
        "    problem node 1: z",
        "  iteration 20  chosen",
        "    node 0 (alpha)  all 6 files, 6.0 KiB",
        "    node 1 (beta)   5 of 6 files, 5.0 KiB; lacks iter_0000020/.metadata",
        "    node 2 (gamma)  nothing",
        "  note iteration 30 was passed over",
        "  node 0 (alpha)  6 files, 6.0 KiB: 6 linked",
        "  node 1 (beta)  2 files, 2.0 KiB: 1 linked, 1 fetched",
    ]


def test_other_nodes_say_one_line() -> None:
    other = Nodes(number=1, count=3, address="10.0.0.2", host="beta")
    assert _text(prepared_lines(_result(), other)) == (
        "node 1 (beta): /v holds iteration 20; 2 files: 1 linked, 1 fetched (2.0 KiB moved)"
    )
    assert _text(status_lines(_result(), other, ())) == "node 1 (beta): told node 0 what is here"
    assert nodes_line(other) == "node 1 of 3 (beta, 10.0.0.2)"
    assert nodes_line(Nodes(host="alpha")) == "node 0 (alpha), the only one"


def test_a_dry_run_says_what_would_be_moved() -> None:
    lines = _text(prepared_lines(_result(None), NODES)).splitlines()
    assert lines[0] == "iteration 20 would be taken"
    assert lines[-1] == "  node 2 (gamma)  1 data files, 1 of them from elsewhere (1.0 KiB)"


def test_status_names_the_newest_that_can_be_whole() -> None:
    result = _result()
    assert best_of(result.candidates) == OLD
    assert "can be whole: iteration 20 is the newest" in _text(status_lines(result, NODES, ()))
    only_new = Result(None, reports=result.reports, candidates=result.candidates[:1])
    assert "NOTHING WHOLE" in _text(status_lines(only_new, NODES, ()))
    assert best_of(only_new.candidates) is None


def test_json_has_all_but_lists_of_blocks() -> None:
    plain = json.loads(json.dumps(result_dict(_result(), NODES)))
    assert plain["view"] == "/v"
    assert plain["agreement"]["files"][INDEX] == {"size_bytes": 1024, "blake3": "ff"}
    assert [one["whole"] for one in plain["candidates"]] == [False, True]
    assert plain["candidates"][1]["missing"]["1"] == [INDEX]
    assert plain["reports"][0]["found"][0] == {
        "step": {"kind": "global", "number": "20", "save": "aa"}, "place": "/ckpt", "files": 5, "bytes": 5120, "problems": [],
    }  # fmt: skip
    assert plain["notes"] == ["a port", "iteration 30 was passed over"]
    assert plain["planned"][0]["node"] == 2


def test_versions_and_pruning() -> None:
    now = Publication("", "2026", "2026")
    views = (
        View(Path("/v.d/b"), True, now, 2048, 1024, NEW),
        View(Path("/v.d/a"), False, now, 2048, 2048, OLD),
        View(Path("/v.d/.staging"), False, Publication(), 512, 512, problem="no record"),
    )
    lines = _text(pruned_lines(views[1:], dry_run=True)).splitlines()
    assert lines[0] == "  /v.d/a  iteration 20, confirmed, 2.0 KiB, 2.0 KiB of it nowhere else"
    assert lines[1].endswith("unfinished, not confirmed, 512 B, 512 B of it nowhere else; no record")
    assert lines[2] == "2 would be removed, 2.5 KiB given back"
    assert _text(pruned_lines((), dry_run=False)) == "nothing removed"
    assert "iteration 30, current" in _text(status_lines(_result(), NODES, views))
    assert view_dict(views[0])["step"]["number"] == "30"
