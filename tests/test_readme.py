"""The README's results are those of the committed records. ``tests/test_pages.py`` checks its commands and links."""

import re
import shlex
import subprocess
import sys

import pytest
from small_run import REPOSITORY

from dsgpt.telemetry.sources import without_sources

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> str:
    """``comparison.md`` as ``make charts`` writes it, made again from the committed records."""
    folder = tmp_path_factory.mktemp("charts")
    recipe = re.search(r"^charts:.*?\n(.*?)\n(?:\n|\Z)", MAKEFILE, flags=re.DOTALL | re.MULTILINE)
    reference = re.search(r"^REFERENCE := (.*)$", MAKEFILE, flags=re.MULTILINE)
    words = shlex.split(recipe.group(1).replace("\\\n", " ").replace("$(REFERENCE)", reference.group(1)))
    words[0] = sys.executable
    words[words.index("--output-dir") + 1] = str(folder)
    subprocess.run(words, cwd=REPOSITORY, check=True, capture_output=True)
    return (folder / "comparison.md").read_text(encoding="utf-8")


def test_the_committed_comparison_is_what_the_records_give(comparison):
    committed = (REPOSITORY / "docs" / "images" / "comparison.md").read_text(encoding="utf-8")
    assert without_sources(committed) == without_sources(comparison)


def test_every_result_is_a_row_of_the_comparison(comparison):
    results = README.split("## Results", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in results.splitlines() if line.startswith("|") and "---" not in line][1:]
    assert len(rows) >= 6
    for row in rows:
        assert row in comparison.splitlines()
    assert "same work: yes" in comparison
    machine = re.search(r"^machine: (.*?)\.", comparison, flags=re.MULTILINE).group(1)
    assert machine in results
