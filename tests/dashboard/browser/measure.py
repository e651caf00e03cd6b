"""How long pages of the dashboard take, and what the server costs meanwhile."""

import argparse
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from dashboard_server import PAGES, REPOSITORY, Server, launch_browser, serving, settle
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from dsgpt.benchmarks.frame import record_head
from dsgpt.common.command_line import run_script
from dsgpt.common.errors import Problems
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.common.text import counted, table
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE
from dsgpt.training.status import RunLock

# What `docs/dashboard.md` says about the dashboard's cost, made from the record of `measure.py`.


PAGE = REPOSITORY / "docs" / "dashboard.md"
HEADING = "\n## What it costs\n"
OPENED = {
    "overview": "Overview opens, first and later",
    "compare": "Compare opens",
    "live": "Live opens, with the newest run",
}
MEMORY = ("before", "opened", "watched")


def costs(record: dict[str, Any], *, source: str) -> str:
    """The part of the page below ``HEADING``; ``source`` is the record's path, for the reader."""
    work, rounds, hardware = record["work"], record["rounds"], record["hardware"]
    opened = dict(OPENED)
    if "long" in rounds[0]["opened_sec"]:  # not in records of 1.0
        opened["long"] = f"Compare opens {work['long_runs']} runs of {work['long_steps']:,} steps, and again"
    rows = [
        (what, ", ".join(_spread([each["opened_sec"][page][state] for each in rounds], " s") for state in (0, 1)))
        for page, what in opened.items()
    ]
    memory = [_spread([each["memory_bytes"][when] / 1e6 for each in rounds], " MB", digits=0) for when in MEMORY]
    rows.append(("memory of the server: before the first page, after these pages, after watching", ", ".join(memory)))
    shares = [100 * each["watching_cores"] for each in rounds]
    rows.append((f"watching {work['growing']} runs that grow, of a core", _spread(shares, "%")))
    return f"""
What one page has read, others need not read again: steps are kept by the identity of their file, and of a file that
grows only the new lines are read. In Chromium, with {work["runs"]} runs of {work["steps"]:,} steps, of which \
{work["growing"]} grow and are watched for
{work["watched_sec"]:g} s, on {hardware["cpu_name"]}, {hardware["cpu_count"]} cores:

{table(("", "median, and least to most"), rows)}

Live looks at the files every two seconds, and every ten if it watches ten runs.

`{source}` has the figures of {counted(len(rounds), "round")}, each on a new server.
Streamlit {record["env"]["streamlit_version"]}, Chromium {record["env"]["chromium_version"]}.
Commit `{record["git_commit"]}`, {record["timestamp_utc"]}.
`PYTHONPATH=tests .venv/bin/python tests/dashboard/browser/measure.py` measures them on your machine.
With `--table-from {source}` it writes this part of the page.
"""


def page_with(text: str, *, page: str) -> str:
    """``page``, whose last part is replaced by ``text``."""
    return page.partition(HEADING)[0] + HEADING + text


def _spread(values: list[float], unit: str, *, digits: int = 1) -> str:
    """``1.7 s (1.6 to 1.9)``."""
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit}" if least == most else f"{middle}{unit} ({least} to {most})"


# How fast the dashboard opens, and what its server costs: 50 runs of 10,000 steps, and ten of them that grow.


SCHEMA_VERSION = "1.1"
SOURCE = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "demo-baseline"
RUNS, STEPS = 50, 10_000
LONG_RUNS, LONG_STEPS = 3, 100_000
ROUNDS = 3
GROWING, WATCHED_SEC, LEAST_WATCHED_SEC, STEP_SEC = 10, 40.0, 30.0, 0.1
PATIENCE_MS = 120_000
VISIBLE = {"": "stDataFrame", "compare": "stVegaLiteChart", "live": "stVegaLiteChart"}
"""What must be seen of a page before it counts as open."""

Round = dict[str, Any]


def main() -> None:
    """Measure and write the record, or write the page's part from a record.

    Raises:
        UserError: Chromium is not installed, or a flag is wrong.
    """
    given = _arguments()
    if given.table_from is not None:
        record = json.loads(given.table_from.read_text(encoding="utf-8"))
        text = costs(record, source=given.table_from.as_posix())
        write_atomic(PAGE, page_with(text, page=PAGE.read_text(encoding="utf-8")).encode())
        return
    began, rounds = time.perf_counter(), []
    for number in range(given.rounds):
        figures, chromium = _round(given.watched_sec)
        rounds.append(figures)
        print(f"[{number + 1}/{given.rounds}] {json.dumps(rounds[-1])}", flush=True)
    work = {"runs": RUNS, "steps": STEPS, "growing": GROWING, "watched_sec": given.watched_sec, "step_sec": STEP_SEC}
    work |= {"long_runs": LONG_RUNS, "long_steps": LONG_STEPS}
    record = record_head(SCHEMA_VERSION, device="cpu") | {"work": work, "rounds": rounds}
    record["env"] |= {"streamlit_version": version("streamlit"), "chromium_version": chromium}
    record["seconds"] = round(time.perf_counter() - began, 1)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(given.output, record)
    print(f"record {given.output}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = Path("checkpoint") / "dashboard" / "dashboard.json"
    parser.add_argument("--output", type=Path, default=output, help="the record to write (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="each on a new server (default: %(default)s)")
    parser.add_argument(
        "--watched_sec", type=float, default=WATCHED_SEC, help="seconds of watching in a round (default: %(default)s)"
    )
    parser.add_argument("--table-from", type=Path, help="measure nothing; write docs/dashboard.md from this record")
    given = parser.parse_args()
    problems = Problems()
    if given.rounds < 1:
        problems.add(f"--rounds {given.rounds}: must be at least 1")
    if given.watched_sec < LEAST_WATCHED_SEC:
        problems.add(
            f"--watched_sec {given.watched_sec:g}: must be {LEAST_WATCHED_SEC:g} or more: Live looks every 10 s"
        )
    problems.raise_if_any()
    return given


def _round(watched_sec: float) -> tuple[Round, str]:
    """The figures of new servers: seconds, bytes and cores; and the browser's version."""
    opened: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        runs = Path(name) / "runs"
        lines = list(islice(_lines(), STEPS))
        for number in range(RUNS):
            _write_run(runs / f"run-{number:02}", lines)
        with serving(runs, log=Path(name) / "log.txt") as server:
            server.wait()
            memory = {"before": _memory(server)}
            browser = launch_browser(playwright)
            for _ in ("first", "later"):
                for page, test_id in VISIBLE.items():
                    with browser.new_context() as context:
                        opened.setdefault(page or "overview", []).append(_opened(context, server, page, test_id))
            memory["opened"] = _memory(server)
            growing = [runs / f"run-{number:02}" for number in range(GROWING)]
            cores = _watch(browser, server, growing, seconds=watched_sec)
            memory["watched"] = _memory(server)
        opened["long"] = _opened_long(browser, Path(name))
        chromium = browser.version
        browser.close()
    return {"opened_sec": opened, "memory_bytes": memory, "watching_cores": cores}, chromium


def _lines() -> Iterator[str]:
    """The lines of the source again and again, with ascending steps."""
    entries = [json.loads(line) for line in (SOURCE / STEPS_FILE).read_text(encoding="utf-8").splitlines()]
    steps = count(1)
    for entry in cycle(entry for entry in entries if "loss" in entry):
        yield json.dumps(entry | {"step": next(steps)}) + "\n"


def _write_run(run_dir: Path, lines: list[str], *, status: str = "completed") -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    record = json.loads((SOURCE / RECORD_FILE).read_text(encoding="utf-8"))
    record |= {"status": status, "run_id": run_dir.name, "host": socket.gethostname()}
    record["training_config"]["total_steps"] = 10 * STEPS
    (run_dir / RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")
    (run_dir / STEPS_FILE).write_text("".join(lines), encoding="utf-8")


def _opened_long(browser: Browser, folder: Path) -> list[float]:
    """Seconds until Compare shows long runs: first, and again in the same browser, which kept the scripts."""
    lines, names = list(islice(_lines(), LONG_STEPS)), [f"long-{number}" for number in range(LONG_RUNS)]
    for name in names:
        _write_run(folder / "long" / name, lines)
    query = "?" + "&".join(f"runs={name}" for name in names)
    with serving(folder / "long", log=folder / "long.txt") as server, browser.new_context() as context:
        server.wait()
        return [_opened(context, server, "compare", VISIBLE["compare"], query=query) for _ in ("first", "again")]


def _opened(context: BrowserContext, server: Server, name: str, test_id: str, *, query: str = "") -> float:
    """Seconds from the navigation until the page is shown, in a new tab."""
    page = context.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    began = time.perf_counter()
    page.goto(f"{server.url}/{name}{query}")
    page.get_by_test_id(test_id).first.wait_for()
    settle(page, PAGES[name])
    seconds = time.perf_counter() - began
    page.close()
    return seconds


def _watch(browser: Browser, server: Server, growing: list[Path], *, seconds: float) -> float:
    """The cores that the server keeps busy while a page watches runs that write a step every ``STEP_SEC``."""
    steps = _lines()
    lines = list(islice(steps, STEPS))
    with ExitStack() as stack:
        files = []
        for run_dir in growing:
            _write_run(run_dir, lines, status="running")
            stack.enter_context(RunLock(run_dir)).take()
            files.append(stack.enter_context((run_dir / STEPS_FILE).open("a", encoding="utf-8")))
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{server.url}/live")
        page.get_by_test_id("stVegaLiteChart").first.wait_for()
        settle(page, PAGES["live"])
        process = psutil.Process(server.process.pid)
        before, began = process.cpu_times(), time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            line = next(steps)
            for file in files:
                file.write(line)
                file.flush()
            time.sleep(STEP_SEC)
        after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / passed


def _memory(server: Server) -> int:
    resident: int = psutil.Process(server.process.pid).memory_info().rss
    return resident


if __name__ == "__main__":
    run_script(main)
