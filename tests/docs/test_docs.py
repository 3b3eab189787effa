"""The docs say what is so: generated pages are up to date, links lead somewhere, transcripts and tables match the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckptguard.core.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("tool", ["cli_reference.py", "fingerprint_vectors.py"])
def test_generated_pages_are_up_to_date(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_every_page_is_reached_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in text, page.name


def test_exit_codes_page_lists_all() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text()
    found = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert found == {int(code) for code in ExitCode}


def test_commands_in_the_readme_exist() -> None:
    from ckptguard.cli.main import cli

    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"^\$ ckptguard (\w[\w-]*)", text, re.MULTILINE):
        assert name in cli.commands, name


def test_the_project_speaks_only_of_itself() -> None:
    """No machine paths, no registry hosts in any tracked text file."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    hosts = "|".join(
        a + r"\." + b for a, b in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("debian", "org"))
    )
    for name in listed:
        path = ROOT / name
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        assert not re.search(hosts, text), name
        assert not re.search(r"(?<![\w./])/(?:" + "work|farm|root" + r")/[\w.]", text), name
