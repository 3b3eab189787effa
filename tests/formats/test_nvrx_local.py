"""Names of local checkpoint files are told apart from all others, and name the rank whose state they hold."""

from __future__ import annotations

import pytest

from ckptguard.formats.nvrx_local import LocalFile, is_rank_folder, parse


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("iter_0000020_0_local.pt", LocalFile(20, 0)),
        ("iter_1234567_1023_local.pt", LocalFile(1234567, 1023)),
        ("iter_0000020_3_local.dirty.pt", LocalFile(20, 3, finished=False)),
        ("iter_20_0_local.pt", None),  # its reader would look for seven digits
        ("iter_0000020_00_local.pt", None),
        ("iter_00000²0_0_local.pt", None),
        ("iter_0000020_0_local.pt.tmp", None),
        ("iter_0000020_0_local.pt\n", None),
        ("iter_0000020", None),
        ("__0_0.distcp", None),
    ],
)
def test_what_a_name_says(name: str, found: LocalFile | None) -> None:
    assert parse(name) == found


@pytest.mark.parametrize(
    ("name", "is_one"), [("0", True), ("17", True), ("07", False), ("²", False), ("a", False), ("", False)]
)
def test_rank_folders_are_plain_numbers(name: str, is_one: bool) -> None:
    assert is_rank_folder(name) is is_one


def test_a_rank_looks_in_its_own_folder() -> None:
    assert LocalFile(20, 3).place("") == "3/iter_0000020_3_local.pt"
    assert LocalFile(20, 3).place("job") == "job/3/iter_0000020_3_local.pt"
