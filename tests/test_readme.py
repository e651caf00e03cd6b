"""The README tells the truth: its figures are the committed records', its paths exist, its flags are known."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]


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
    assert (REPOSITORY / "docs" / "images" / "comparison.md").read_text(encoding="utf-8") == comparison


def test_every_result_is_a_row_of_the_comparison(comparison):
    results = README.split("## Results", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in results.splitlines() if line.startswith("|") and "---" not in line][1:]
    assert len(rows) >= 6
    for row in rows:
        assert row in comparison.splitlines()
    assert "same work: yes" in comparison
    machine = re.search(r"^machine: (.*?)\.", comparison, flags=re.MULTILINE).group(1)
    assert machine in results


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(path):
    assert (REPOSITORY / path).exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_scripts_and_flags_that_exist(command):
    words = shlex.split(command, comments=True)
    scripts = [word for word in words if word.endswith(".py")]
    for script in scripts:
        source = REPOSITORY / script
        assert source.exists()
        known = subprocess.run(
            [sys.executable, str(source), "--help"], capture_output=True, text=True, check=True
        ).stdout
        for flag in (word for word in words[words.index(script) :] if word.startswith("--")):
            assert re.search(rf"{flag}\b", known), f"{script} knows no {flag}"
    for recipe in re.findall(r"ds_configs/\S+\.json", command):
        assert Path(REPOSITORY / recipe).exists()
    if words[0] == "make":
        assert f"\n{words[1]}:" in MAKEFILE
