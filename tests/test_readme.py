"""The README's results are those of the committed records. ``tests/test_pages.py`` checks its commands and links."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.records import RECORDS, show_words
from dsgpt.record.provenance import without_sources

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
IMAGES = REPOSITORY / "docs" / "images"


@pytest.fixture(scope="module")
def commands() -> list[list[str]]:
    """The words of the commands of ``make charts``: that of the pages first, without the interpreter."""
    words = ["make", "--dry-run", "--no-print-directory", "--old-file", ".venv/bin/.installed", "charts"]
    found = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=REPOSITORY, env=found, check=True, capture_output=True, text=True)
    return [shlex.split(line)[1:] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def charts(commands, tmp_path_factory) -> Path:
    """What ``make charts`` writes for the pages, made again from the committed records."""
    folder = tmp_path_factory.mktemp("charts")
    words = [sys.executable, *commands[0]]
    words[words.index("--output-dir") + 1] = str(folder)
    subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def comparison(charts) -> str:
    return (charts / "comparison.md").read_text(encoding="utf-8")


def test_the_committed_pictures_are_those_of_the_records(charts):
    """Not their bytes: another machine may have another version of the library that sets letters."""
    assert {path.name for path in charts.iterdir()} == {path.name for path in IMAGES.iterdir() if path.is_file()}


def test_remaking_the_records_draws_the_same_charts(commands):
    pages, everything = commands
    assert sorted(show_words(RECORDS["demo"], REPOSITORY)) == sorted(pages)
    assert everything[everything.index("--output-dir") + 1] == "charts/reference" and "--only" not in everything


def test_the_committed_comparison_is_what_the_records_give(comparison):
    committed = (IMAGES / "comparison.md").read_text(encoding="utf-8")
    assert without_sources(committed) == without_sources(comparison)


def test_every_result_is_a_row_of_the_comparison(comparison):
    results = README.split("## Try it", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in results.splitlines() if line.startswith("|") and "---" not in line][1:]
    assert len(rows) >= 6
    for row in rows:
        assert row in comparison.splitlines()
    assert "same work: yes" in comparison and "The work is the same." in results
    machine = re.search(r"^machine: (.*?)\.", comparison, flags=re.MULTILINE).group(1)
    assert machine in results


def test_the_plan_is_what_its_command_prints(tmp_path):
    command, shown = re.search(
        r"```bash\n(.*plan\.py.*)\n```.*?```text\n(.*?)```", README.split("## Plan", 1)[1], flags=re.DOTALL
    ).groups()
    words = [sys.executable, *shlex.split(command)[1:], "--into", str(tmp_path)]
    done = subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) >= 8
    assert [line for line in lines if line not in done.stdout.splitlines()] == []


def test_the_sweep_is_that_of_its_page():
    """``tests/benchmarks/test_sweeps.py`` holds the page to the record."""
    page = (REPOSITORY / "docs" / "sweep-strategies.md").read_text(encoding="utf-8")
    compared = README.split("## Compare", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in compared.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) >= 5
    assert [row for row in rows if row not in page.splitlines()] == []
    words = re.search(r"benchmark\.py run (.*)", compared).group(1).split()
    assert words[words.index("--repeats") + 1] in re.search(r"trained (\d+) times", page).group(1)
