"""Pages, charts of the committed records and every ``--help`` are the committed ones, and import nothing slow.

``pytest tests/goldens --snapshot-update`` writes the help and the list of charts anew, ``make records`` the pages.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transcripts import REPOSITORY, Row, read, require_golden, run

from dsgpt.__main__ import COMMANDS
from dsgpt.benchmarks.records import RECORDS, REFERENCE

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
SHOWN = {name: record.show for name, record in RECORDS.items() if "--table-from" in record.show}
"""Record to the command that makes its page."""
HELP = [part for part in read(Path(__file__).with_name("help.txt").read_text()) if isinstance(part, Row)]
PARTS = ("src", "charts", "data_prep")
SLOW = {"torch", "deepspeed", "transformers"}
CHECK = ["src/benchmark.py", "records", "--check"]
CHARTS = ["charts/generate_charts.py", "--format", "svg", "--output-dir"]


def without_sources(page: Path) -> list[str]:
    """The paragraphs of a page but the one that says which sources have changed since."""
    return [part for part in page.read_text(encoding="utf-8").split("\n\n") if not part.startswith("Sources: ")]


def test_every_record_has_a_page():
    """That of the dashboard is of no suite: ``tests/dashboard/browser`` has its page."""
    assert {path.stem for path in (REPOSITORY / REFERENCE).glob("*.json")} == SHOWN.keys() | {"dashboard"}


@pytest.mark.parametrize("record", SHOWN)
def test_a_page_is_made_from_its_record(record, tmp_path):
    made, page = tmp_path / "page.md", SHOWN[record][-1]
    done = run([*SHOWN[record][:-1], str(made)], cwd=REPOSITORY)
    assert done.code == 0, done.err
    assert without_sources(made) == without_sources(REPOSITORY / page)


def report(folder: str) -> None:
    """Run the commands in a Python without torch; print each with its exit code and what it imported of ``SLOW``."""
    from matplotlib.figure import Figure

    Figure.savefig = lambda figure, file, **_: file.write(b"<svg/>")  # names and texts are compared, no pixels
    inputs = {"sweep": ("sweep-strategies.json", "sweep-scaling.json"), "plan": ("plan.json",)}
    inputs |= {"inference": ("inference.json",)}
    words = [word for flag, files in inputs.items() for file in files for word in (f"--{flag}", f"{REFERENCE}/{file}")]
    words += [word for name in ("baseline", "zero1") for word in ("--run", f"{name}={REFERENCE}/demo-{name}")]
    for command in ([*CHARTS, folder, *words], CHECK, *(row.command.split() for row in HELP)):
        done = run(command, cwd=REPOSITORY)
        print(json.dumps([" ".join(command), done.code, sorted(SLOW.intersection(done.modules)), done.out, done.err]))


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list], Path]:
    """What ``report`` found, and the folder with the charts."""
    folder = tmp_path_factory.mktemp("charts")
    program = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__}; {__name__}.report({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], folder


def test_nothing_slow_is_imported(reported):
    commands, _ = reported
    assert [(command, slow) for command, code, slow, *_ in commands if code or slow] == []
    assert len(commands) == len(HELP) + 2


def test_every_help_is_that_of_the_transcript(reported, request):
    printed = {command: out for command, _, _, out, _ in reported[0]}
    text = (Path(__file__).with_name("help.txt")).read_text(encoding="utf-8")
    parts = [part if isinstance(part, str) else part.with_output(printed[part.command]).text for part in read(text)]
    require_golden("help.txt", "\n\n".join(parts) + "\n", request)


def test_the_help_of_every_command_is_there():
    scripts = {path.relative_to(REPOSITORY).as_posix() for part in PARTS for path in (REPOSITORY / part).glob("*.py")}
    helps = {row.command: row.output for row in HELP}
    suites = re.search(r"\{(.*)\}", helps["src/benchmark.py --help"])[1].split(",")
    commands = scripts | {f"src/benchmark.py {suite}" for suite in suites}
    groups = {command.split()[0] for command in COMMANDS if " " in command}
    modules = {command for command, (target, _) in COMMANDS.items() if ".py" not in target}
    commands |= {"dsgpt", *(f"dsgpt {name}" for name in groups | modules)}
    assert {f"{command} --help" for command in commands} == helps.keys()


def test_the_charts_of_the_records(reported, request):
    commands, folder = reported
    printed = commands[0][3].replace(str(folder), "FOLDER")
    names = "".join(f"{path.name}\n" for path in sorted(folder.iterdir()))
    require_golden("charts.txt", f"{printed}\n{names}", request)
    assert without_sources(folder / "comparison.md") == without_sources(REPOSITORY / "docs/images/comparison.md")
