"""Runs, a dashboard of them and a browser, which the tests of this folder share."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dashboard_server import HOSTILE, PAGES, SECOND, Server, launch_browser, serving, settle
from playwright.sync_api import BrowserContext, ConsoleMessage, Page, expect, sync_playwright
from small_run import command_line, random_ids, write_inputs, write_tokenizer, write_tokens

from dsgpt.common.errors import UserError
from dsgpt.training.command import train

POSITIONS = 64
PROBES = re.compile(r"/\w+/_stcore/(health|host-config)$")
"""Streamlit's page looks for its server below its own address first, and Chromium reports the answer 404."""

PATIENCE_MS = 60_000
"""Far more than a page needs; the default is 5 s, and some machines are slow."""
expect.set_options(timeout=PATIENCE_MS)
LISTENING = """\
import sys
def note(event, about):
    if event in {"socket.connect", "socket.sendto", "socket.getaddrinfo"}:
        with open(FILE, "a") as file:
            print(repr(about[1] if event == "socket.connect" else about[:2]), file=file)
open(FILE, "w").close()
sys.addaudithook(note)
"""
"""What the server runs first, so that a file lists where it connects to."""

Visit = Callable[..., Page]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Makes the flags of a training of a tiny model."""
    inputs = write_inputs(tmp_path_factory.mktemp("inputs"))
    tokenizer = write_tokenizer(inputs / "own" / "tokenizer")
    train_data = write_tokens(inputs / "own" / "train.bin", random_ids(800 * POSITIONS + 1), tokenizer=tokenizer)
    val_data = write_tokens(inputs / "own" / "val.bin", random_ids(8 * POSITIONS + 1, seed=1))
    given = {"max_position_embeddings": POSITIONS, "no_inference": True}
    given |= {"train_data_path": train_data, "val_data_path": val_data}
    return lambda **changes: command_line(inputs, **given | changes)


@pytest.fixture(scope="session")
def server(folder: Path, words: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A dashboard of two equal runs, of one whose name is markup, and of one with a damaged record.

    ``connections.txt`` beside its log lists where it connects to.
    """
    own = tmp_path_factory.mktemp("server")
    (own / "sitecustomize.py").write_text(f"FILE = {str(own / 'connections.txt')!r}\n{LISTENING}")
    environment = os.environ | {"PYTHONPATH": str(own)}
    flags = ["--allowed_host", "Lab.example"]
    with serving(folder, log=own / "log.txt", flags=flags, environment=environment) as started:
        assert train(words(checkpoint_path=folder / "first", max_train_steps=3)) == 0
        shutil.copytree(folder / "first", folder / SECOND)
        shutil.copytree(folder / "first", folder / HOSTILE, ignore=shutil.ignore_patterns("step-*"))
        (folder / "damaged").mkdir()
        (folder / "damaged" / "training_metrics.json").write_text('{"schema_version": "2.')
        started.wait()
        yield started


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[BrowserContext]:
    """A browser that keeps Streamlit's scripts; each of its tabs is a session of the dashboard.

    Each file has its own: while Playwright runs, its event loop is the thread's, and tests of other files need theirs.
    """
    with sync_playwright() as playwright:
        try:
            started = launch_browser(playwright)
        except UserError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        with started, started.new_context() as context:
            context.set_default_timeout(PATIENCE_MS)
            yield context


@pytest.fixture
def visit(server: Server, browser: BrowserContext) -> Iterator[Visit]:
    """Opens a page of the dashboard in a new tab; afterwards, no visit may have had an error.

    A request to another machine is an error, too.
    """
    errors: list[str] = []

    def report(message: ConsoleMessage) -> None:
        if message.type == "error" and not PROBES.search(message.location["url"]):
            errors.append(f"{message.text} {message.location}")

    def leave(url: str) -> None:
        if not url.startswith((server.url, server.url.replace("http", "ws"), "data:", "blob:")):
            errors.append(f"a request to {url}")

    def open_page(name: str, query: str = "") -> Page:
        page = browser.new_page()
        page.set_viewport_size({"width": 1280, "height": 900})
        page.on("console", report)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: leave(request.url))
        page.on("websocket", lambda socket: leave(socket.url))
        page.goto(f"{server.url}/{name}{query}")
        settle(page, PAGES[name])
        return page

    yield open_page
    for page in browser.pages:
        broken = page.get_by_test_id("stException").all_inner_texts()
        page.close()
        assert not broken, server.log.read_text()
    assert not errors
