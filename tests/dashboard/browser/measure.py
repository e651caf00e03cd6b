"""How fast the dashboard opens, and what its server costs: 50 runs of 10,000 steps, and ten of them that grow.

The runs are copies of a committed one, whose steps are repeated with ascending numbers. It prints a line per figure.
"""

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, cycle, islice
from pathlib import Path

import psutil
from dashboard_server import PAGES, REPOSITORY, Server, launch_browser, serving, settle
from playwright.sync_api import Browser, sync_playwright

from dsgpt.common.script import run_script
from dsgpt.telemetry.record import RECORD_FILE, STEPS_FILE
from dsgpt.training.run_lock import RunLock

SOURCE = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "demo-baseline"
RUNS, STEPS = 50, 10_000
GROWING, WATCHED_SEC, STEP_SEC = 10, 60.0, 0.1
PATIENCE_MS = 120_000
VISIBLE = {"": "stDataFrame", "compare": "stVegaLiteChart", "live": "stVegaLiteChart"}
"""What must be seen of a page before it counts as open."""


def main() -> None:
    """Measure, and print the figures.

    Raises:
        UserError: Chromium is not installed.
    """
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        runs = Path(name) / "runs"
        lines = list(islice(_lines(), STEPS))
        for number in range(RUNS):
            _write_run(runs / f"run-{number:02}", lines)
        with serving(runs, log=Path(name) / "log.txt") as server:
            server.wait()
            _print_memory(server, "before the first page")
            browser = launch_browser(playwright)
            for state in ("cold", "warm"):
                for page, test_id in VISIBLE.items():
                    print(f"{PAGES[page]}, {state}: {_opened(browser, server, page, test_id):.2f} s", flush=True)
            _print_memory(server, "after these pages")
            _watch(browser, server, [runs / f"run-{number:02}" for number in range(GROWING)])
            _print_memory(server, "after watching")
            browser.close()


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


def _opened(browser: Browser, server: Server, name: str, test_id: str) -> float:
    """Seconds from the navigation until the page is shown, in a browser that has never seen it."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    began = time.perf_counter()
    page.goto(f"{server.url}/{name}")
    page.get_by_test_id(test_id).first.wait_for()
    settle(page, PAGES[name])
    seconds = time.perf_counter() - began
    context.close()
    return seconds


def _watch(browser: Browser, server: Server, growing: list[Path]) -> None:
    """Print the server's share of a core while a page watches runs that write a step every ``STEP_SEC``."""
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
        while (passed := time.perf_counter() - began) < WATCHED_SEC:
            line = next(steps)
            for file in files:
                file.write(line)
                file.flush()
            time.sleep(STEP_SEC)
        after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    print(f"watching {len(growing)} runs: {used / passed:.1%} of a core")


def _print_memory(server: Server, when: str) -> None:
    print(f"server {when}: {psutil.Process(server.process.pid).memory_info().rss / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    run_script(main)
