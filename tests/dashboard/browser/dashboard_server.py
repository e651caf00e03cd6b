"""A dashboard in a process of its own, and trainings that it watches."""

import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, Playwright
from system_packages import browser

from dsgpt.common.errors import UserError
from dsgpt.machine.launcher import launcher_command
from dsgpt.machine.topology import free_port

# The dashboard in its own process, as users start it, and the browser that looks at it.


REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = {"": "Overview", "compare": "Compare", "live": "Live", "spikes": "Spikes", "split": "How it is split"}
PAGES |= {"plan": "Plan and cost", "generate": "Try it"}
"""Address and title of every page."""
HOSTILE = (
    '<img src=x onerror="window.hit=1"><b>bold<b> **strong** [link](http:evil) $x$ :red[y] `z` '
    ":smile::a: :material_home: a -> b 10:20:30 www.evil.com a@b.co"
)
"""The name of a run, in HTML, in Markdown, and in what Streamlit adds to it."""
SECOND = "second-of-two-equal-runs-whose-name-is-so-long-that-it-takes-two-lines"
START_SEC = 300


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + START_SEC
        while True:
            with suppress(urllib.error.URLError), urllib.request.urlopen(f"{self.url}/_stcore/health") as answer:
                assert answer.status == 200
                return
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)


@contextmanager
def serving(
    runs: Path, *, log: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A dashboard of ``runs`` on a free port, which may still be starting; ``log`` gets what it prints."""
    port = free_port()
    command = [sys.executable, "-m", "streamlit", "run", REPOSITORY / "charts" / "dashboard.py"]
    command += ["--server.headless", "true", "--server.port", port, "--", "--runs", runs, *flags]
    with log.open("wb") as file:
        process = subprocess.Popen([*map(str, command)], stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield Server(process, port, log)
    finally:
        process.kill()
        process.wait()


def launch_browser(playwright: Playwright) -> Browser:
    """Debian's Chromium, or Chrome, without a window.

    Raises:
        UserError: it is not installed.
    """
    path = browser()
    if path is None:
        raise UserError("Chromium is missing: apt-get install chromium")
    return playwright.chromium.launch(executable_path=path)


def settle(page: Page, title: str) -> None:
    """Wait until the page of this title is shown whole."""
    page.get_by_role("heading", level=1, name=title, exact=True).wait_for()
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()
    page.wait_for_function("() => !document.querySelector('[data-testid=stSkeleton], [data-stale=true]')")


# A real training that waits after some steps, so that what is seen of it does not depend on its speed.


SCRIPT = str(REPOSITORY / "src" / "gpt2.py")


@contextmanager
def paused(words: Sequence[str], *, after: int) -> Iterator[subprocess.Popen[str]]:
    """Train with the flags ``words``, of which one prints every step, and stop the process after some steps."""
    command = [*launcher_command("python", 1), SCRIPT, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            lines = []
            for line in run.stdout:
                lines.append(line)
                if re.match(rf"step +{after}/", line):
                    break
            else:
                raise AssertionError("".join(lines))
            run.send_signal(signal.SIGSTOP)
            yield run
        finally:
            run.kill()
