"""How long pages of the dashboard take, and what the server costs meanwhile."""

import json
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import psutil
from chart_records import write_run
from dashboard_server import PAGES, REPOSITORY, Server, launch_browser, serving, settle
from playwright.sync_api import Browser, BrowserContext, sync_playwright

from dsgpt.benchmarks.frame import record_head
from dsgpt.common.command_line import run_script
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import table
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE
from dsgpt.training.status import RunLock

REFERENCE = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores"
RECORD = REFERENCE / "dashboard.json"
SOURCE = REFERENCE / "demo-baseline"
"""The run whose lines all runs have."""
ROUNDS, RUNS, STEPS, LONG_RUNS, LONG_STEPS = 3, 50, 10_000, 3, 100_000
GROWING, WATCHED_SEC, STEP_SEC = 10, 40.0, 0.1
WORK = {"runs": RUNS, "steps": STEPS, "growing": GROWING, "watched_sec": WATCHED_SEC, "step_sec": STEP_SEC}
WORK |= {"long_runs": LONG_RUNS, "long_steps": LONG_STEPS}
VISIBLE = {"overview": "stDataFrame", "compare": "stVegaLiteChart", "live": "stVegaLiteChart"}
"""What must be seen of a page before it counts as open."""
OPENED = {"overview": "Overview opens, first and later", "compare": "Compare opens"}
OPENED["live"] = "Live opens, with the newest run"
OPENED["long"] = f"Compare opens {LONG_RUNS} runs of {LONG_STEPS:,} steps, and again"


def costs(record: dict[str, Any]) -> str:
    """The part of ``docs/dashboard.md`` that has the figures of a record."""
    rounds, env, hardware = record["rounds"], record["env"], record["hardware"]
    rows = [
        (what, ", ".join(_spread([each["opened_sec"][name][state] for each in rounds], " s") for state in (0, 1)))
        for name, what in OPENED.items()
    ]
    memory = ([each["memory_bytes"][when] / 1e6 for each in rounds] for when in ("before", "opened", "watched"))
    what = "memory of the server: before the first page, after these pages, after watching"
    rows.append((what, ", ".join(_spread(sizes, " MB", digits=0) for sizes in memory)))
    shares = [100 * each["watching_cores"] for each in rounds]
    rows.append((f"watching {GROWING} runs that grow, of a core", _spread(shares, "%")))
    return f"""{table(("", "median, and least to most"), rows)}

Measured {len(rounds)} times, each on a new server, on {hardware["cpu_name"]}, {hardware["cpu_count"]} cores, with
Streamlit {env["streamlit_version"]} and Chromium {env["chromium_version"]}.
Commit `{record["git_commit"]}`, {record["timestamp_utc"]}.
"""


def _spread(values: list[float], unit: str, *, digits: int = 1) -> str:
    """``1.7 s (1.6 to 1.9)``."""
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle}{unit}" if least == most else f"{middle}{unit} ({least} to {most})"


def main() -> None:
    """Measure, write the record and print the page's part.

    Raises:
        UserError: Chromium is not installed.
    """
    began, rounds = time.perf_counter(), []
    with sync_playwright() as playwright:
        browser = launch_browser(playwright)
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append(_round(browser, Path(folder)))
            print(f"[{len(rounds)}/{ROUNDS}] {json.dumps(rounds[-1])}", flush=True)
        chromium = browser.version
        browser.close()
    record = record_head("1.1", device="cpu") | {"work": WORK, "rounds": rounds}
    record["env"] |= {"streamlit_version": version("streamlit"), "chromium_version": chromium}
    record["seconds"] = round(time.perf_counter() - began, 1)
    write_json_atomic(RECORD, record)
    print(costs(record))


def _round(browser: Browser, folder: Path) -> dict[str, Any]:
    """The figures of new servers: seconds, bytes and cores."""
    steps = [json.loads(line) for line in (SOURCE / STEPS_FILE).read_text(encoding="utf-8").splitlines()]
    endless = enumerate(cycle(entry for entry in steps if "loss" in entry), start=1)
    lines = [entry | {"step": step} for step, entry in islice(endless, LONG_STEPS)]
    opened, memory = dict[str, list[float]](), dict[str, int]()
    for number in range(RUNS):
        _write_run(folder / "runs" / f"run-{number:02}", lines[:STEPS])
    with serving(folder / "runs", log=folder / "log.txt") as server:
        server.wait()
        process = psutil.Process(server.process.pid)
        memory["before"] = process.memory_info().rss
        for _ in ("first", "later"):
            for name in VISIBLE:
                with browser.new_context() as context:
                    opened.setdefault(name, []).append(_opened(context, server, name))
        memory["opened"] = process.memory_info().rss
        growing = [folder / "runs" / f"run-{number:02}" for number in range(GROWING)]
        with browser.new_context() as context:
            cores = _watch(context, server, process, growing, lines)
        memory["watched"] = process.memory_info().rss
    names = [f"long-{number}" for number in range(LONG_RUNS)]
    for name in names:
        _write_run(folder / "long" / name, lines)
    with serving(folder / "long", log=folder / "long.txt") as server, browser.new_context() as context:
        server.wait()  # the second time, the browser has kept the scripts
        opened["long"] = [_opened(context, server, "compare", runs=names) for _ in ("first", "again")]
    return {"opened_sec": opened, "memory_bytes": memory, "watching_cores": cores}


def _write_run(run_dir: Path, lines: list[dict[str, Any]], *, status: str = "completed") -> None:
    values = json.loads((SOURCE / RECORD_FILE).read_text(encoding="utf-8"))
    values |= {"status": status, "run_id": run_dir.name, "host": socket.gethostname()}
    values["training_config"]["total_steps"] = 10 * STEPS
    write_run(run_dir, values, lines=lines)


def _opened(context: BrowserContext, server: Server, name: str, *, runs: Sequence[str] = ()) -> float:
    """Seconds from the navigation until the page is shown, in a new tab, which stays open in its context."""
    page = context.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.set_default_timeout(120_000)
    began, path = time.perf_counter(), name.replace("overview", "")
    page.goto(f"{server.url}/{path}?{urlencode({'runs': runs}, doseq=True)}")
    page.get_by_test_id(VISIBLE[name]).first.wait_for()
    settle(page, PAGES[path])
    return time.perf_counter() - began


def _watch(
    context: BrowserContext, server: Server, process: psutil.Process, growing: list[Path], lines: list[dict[str, Any]]
) -> float:
    """The cores that the server keeps busy while a page watches runs that write a step every ``STEP_SEC``."""
    with ExitStack() as stack:
        files = []
        for run_dir in growing:
            _write_run(run_dir, lines[:STEPS], status="running")
            stack.enter_context(RunLock(run_dir)).take()
            files.append(stack.enter_context((run_dir / STEPS_FILE).open("a", encoding="utf-8", buffering=1)))
        _opened(context, server, "live")
        before, began = process.cpu_times(), time.perf_counter()
        for line in lines[STEPS : STEPS + int(WATCHED_SEC / STEP_SEC)]:
            for file in files:
                print(json.dumps(line), file=file)
            time.sleep(STEP_SEC)
        after, passed = process.cpu_times(), time.perf_counter() - began
    return (after.user + after.system - before.user - before.system) / passed


if __name__ == "__main__":
    run_script(main)
