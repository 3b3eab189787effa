"""The record in a view says again what was agreed; what is no record is told by file and cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from publish_cases import agreement_on, files_of

from ckptguard.core.errors import DamagedError, EnvironmentFailedError, NotFoundError
from ckptguard.view.records import (
    NAME,
    Publication,
    put_file,
    read_publication,
    read_record,
    write_publication,
    write_record,
)

AGREEMENT = agreement_on(files_of())


def test_a_record_comes_back_and_can_be_read_by_people(tmp_path: Path) -> None:
    write_record(tmp_path, AGREEMENT, 1)
    record = read_record(tmp_path)
    assert (record.agreement, record.node, record.format) == (AGREEMENT, 1, "ckptguard-view/1")
    assert record.staged.endswith("+00:00")
    text = (tmp_path / NAME).read_text()
    assert '\n    "step": {\n      "kind": "global",\n      "number": "20",' in text
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_no_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=rf"{NAME}: not there"):
        read_record(tmp_path)
    (tmp_path / NAME).mkdir()
    with pytest.raises(DamagedError, match="cannot be read: Is a directory"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expecting value"),
        ('{"format": "ckptguard-view/1", "node"', "delimiter"),
        ("[1]", "format 'list'"),
        ('{"format": "ckptguard-view/2"}', "format 'ckptguard-view/2', expected 'ckptguard-view/1'"),
        ('{"format": "ckptguard-view/1"}', "missing node, staged, agreement"),
        ("[" * 100_000, "recursion"),
        (b"\xff{}", "decode"),
    ],
)
def test_what_is_no_record_is_told_with_the_cause(tmp_path: Path, text: str | bytes, told: str) -> None:
    (tmp_path / NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamagedError, match=rf"{NAME}: not the record of a view: .*{told}") as caught:
        read_record(tmp_path)
    assert "Prepare the view again" in caught.value.next_step


def test_a_record_cut_or_flipped_anywhere_is_not_misread(tmp_path: Path) -> None:
    write_record(tmp_path, AGREEMENT, 1)
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).unlink()
    for cut in range(0, len(whole) - 2, 7):
        (tmp_path / NAME).write_bytes(whole[:cut])
        with pytest.raises(DamagedError):
            read_record(tmp_path)


def test_a_record_that_names_files_elsewhere_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path, AGREEMENT, 1)
    plain = json.loads((tmp_path / NAME).read_text())
    plain["agreement"]["files"]["../../etc/passwd"] = {"size_bytes": 1, "blake3": ""}
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_text(json.dumps(plain))
    with pytest.raises(DamagedError, match="not a plain relative path"):
        read_record(tmp_path)


def test_what_happened_to_a_view_comes_back_and_else_nothing_has(tmp_path: Path) -> None:
    path = tmp_path / "0000020-1f3a.json"
    assert read_publication(path) == Publication()
    publication = Publication("0000010-aaaa", "then", "")
    write_publication(path, publication)
    write_publication(path, publication)
    assert read_publication(path) == publication
    path.unlink()
    path.write_text('{"previous": 3}')
    assert read_publication(path) == Publication()


def test_a_file_is_replaced_whole_and_is_read_only(tmp_path: Path) -> None:
    own, path = tmp_path / "own", tmp_path / "x"
    own.write_bytes(b"mine")
    path.hardlink_to(own)
    (tmp_path / "x.tmp").hardlink_to(own)
    put_file(path, b"new")
    assert (path.read_bytes(), own.read_bytes()) == (b"new", b"mine")
    assert not path.stat().st_mode & 0o222
    assert own.stat().st_mode & 0o200
    with pytest.raises(EnvironmentFailedError, match="cannot be written"):
        put_file(own / "x", b"")
