"""The README's results are those of the committed records. ``tests/test_pages.py`` checks its commands and links."""

import os
import re
import shlex
import subprocess

from forked_ranks import run_script
from small_run import REPOSITORY

from dsgpt.benchmarks.records import RECORDS, show_words

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
IMAGES = REPOSITORY / "docs" / "images"
COMPARISON = (IMAGES / "comparison.md").read_text(encoding="utf-8")
"""``tests/goldens/test_golden_records.py`` holds it to the records."""
WITHOUT_PIXELS = """
import runpy
import sys
from matplotlib.figure import Figure
Figure.savefig = lambda figure, file, **_: file.write(b"<svg/>")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_make_charts_writes_the_committed_pictures_and_remaking_the_records_too(tmp_path):
    """Their names, not their bytes: another machine may have another version of the library that sets letters."""
    words = ["make", "--dry-run", "--no-print-directory", "--old-file", ".venv/bin/.installed", "charts"]
    found = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=REPOSITORY, env=found, check=True, capture_output=True, text=True)
    pages, everything = (shlex.split(line)[1:] for line in done.stdout.splitlines())
    assert sorted(show_words(RECORDS["demo"], REPOSITORY)) == sorted(pages)
    assert everything[everything.index("--output-dir") + 1] == "charts/reference" and "--only" not in everything
    pages[pages.index("--output-dir") + 1] = str(tmp_path / "charts")
    (tmp_path / "script.py").write_text(WITHOUT_PIXELS)
    drawn = run_script(tmp_path / "script.py", pages, cwd=REPOSITORY)
    assert drawn.returncode == 0, drawn.stderr
    assert {path.name for path in (tmp_path / "charts").iterdir()} == {
        path.name for path in IMAGES.iterdir() if path.is_file()
    }


def test_every_result_is_a_row_of_the_comparison():
    results = README.split("## Try it", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in results.splitlines() if line.startswith("|") and "---" not in line][1:]
    assert len(rows) >= 6
    for row in rows:
        assert row in COMPARISON.splitlines()
    assert "same work: yes" in COMPARISON and "The work is the same." in results
    machine = re.search(r"^machine: (.*?)\.", COMPARISON, flags=re.MULTILINE).group(1)
    assert machine in results


def test_the_plan_is_what_its_command_prints(tmp_path):
    command, shown = re.search(
        r"```bash\n(.*plan\.py.*)\n```.*?```text\n(.*?)```", README.split("## Plan", 1)[1], flags=re.DOTALL
    ).groups()
    _, script, *words = shlex.split(command)
    done = run_script(REPOSITORY / script, [*words, "--into", tmp_path], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
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
