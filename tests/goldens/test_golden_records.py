"""Pages and charts of the committed records are the committed ones; these and every ``--help`` import no torch.

``pytest tests/goldens --snapshot-update`` writes the list of charts anew. ``make records`` makes the pages.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transcripts import REPOSITORY, Row, read, require_golden, run

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
REFERENCE = Path("checkpoint/reference/cpu-2-cores")
PAGES = {
    "parity": ("parity", "parity"),
    "resume": ("resume", "resume"),
    "faults": ("faults", "faults"),
    "saving": ("saving", "saving"),
    "speed": ("speed", "speed"),
    "decoding": ("decoding", "decoding"),
    "inference": ("inference", "concurrency"),
    "serving": ("serving", "serving-load"),
    "plan": ("plan", "planner"),
    "recipes": ("recipes", "recipe-search"),
    "sweep-scaling": ("run", "sweep-scaling"),
    "sweep-strategies": ("run", "sweep-strategies"),
}
"""Record to the command that makes its page, and the page."""
NO_SUITE = {"dashboard"}
HELP = [row.command.split() for row in read(Path(__file__).with_name("help.txt").read_text()) if isinstance(row, Row)]
CHECK = ["src/benchmark.py", "records", "--check"]
CHARTS = ["charts/generate_charts.py", "--format", "svg", "--output-dir"]


def without_sources(page: Path) -> list[str]:
    """The paragraphs of a page but the one that says which sources have changed since."""
    return [part for part in page.read_text(encoding="utf-8").split("\n\n") if not part.startswith("Sources: ")]


def test_every_record_has_a_page():
    records = {path.stem for path in (REPOSITORY / REFERENCE).glob("*.json")}
    assert records - NO_SUITE == PAGES.keys()


@pytest.mark.parametrize("record", PAGES)
def test_a_page_is_made_from_its_record(record, tmp_path):
    command, page = PAGES[record]
    made = tmp_path / "page.md"
    words = ["src/benchmark.py", command, "--table-from", f"{REFERENCE}/{record}.json", "--page", str(made)]
    done = run(words, cwd=REPOSITORY)
    assert done.code == 0, done.err
    assert without_sources(made) == without_sources(REPOSITORY / "docs" / f"{page}.md")


def report(folder: str) -> None:
    """Run the commands in a Python without torch; print each with its exit code and whether it imported torch."""
    from matplotlib.figure import Figure

    Figure.savefig = lambda figure, file, **_: file.write(b"<svg/>")  # names and texts are compared, no pixels
    inputs = {"sweep": ("sweep-strategies.json", "sweep-scaling.json"), "plan": ("plan.json",)}
    inputs |= {"inference": ("inference.json",)}
    words = [word for flag, files in inputs.items() for file in files for word in (f"--{flag}", f"{REFERENCE}/{file}")]
    words += [word for name in ("baseline", "zero1") for word in ("--run", f"{name}={REFERENCE}/demo-{name}")]
    for command in ([*CHARTS, folder, *words], CHECK, *HELP):
        done = run(command, cwd=REPOSITORY)
        print(json.dumps([" ".join(command), done.code, "torch" in done.modules, done.out, done.err]))


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list], Path]:
    """What ``report`` found, and the folder with the charts."""
    folder = tmp_path_factory.mktemp("charts")
    program = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__}; {__name__}.report({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], folder


def test_torch_is_not_imported(reported):
    commands, _ = reported
    assert [command for command, code, torch, *_ in commands if code or torch] == []
    assert len(commands) == len(HELP) + 2


def test_the_charts_of_the_records(reported, request):
    commands, folder = reported
    printed = commands[0][3].replace(str(folder), "FOLDER")
    names = "".join(f"{path.name}\n" for path in sorted(folder.iterdir()))
    require_golden("charts.txt", f"{printed}\n{names}", request)
    assert without_sources(folder / "comparison.md") == without_sources(REPOSITORY / "docs/images/comparison.md")
