"""Real text, prepared by the real script, and small real runs over it; and an option that leaves out tests."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import launches_fork, start_server
from hypothesis import settings
from scheduling import SHARED, folder_of, pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401
from small_run import REPOSITORY, command_line, random_ids, write_data, write_inputs, write_recipe, write_tokens
from system_packages import MAY_LACK, command, lacking

from dsgpt.benchmarks.cells import Corpus, cut_validation, prepare_corpus
from dsgpt.common.command_line import raise_on_signals
from dsgpt.training.command import train

settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
settings.load_profile("seeded")


@pytest.fixture(scope="module", autouse=True)
def no_event_loop_is_left() -> Iterator[None]:
    """Fails a file that leaves an event loop running, as Playwright does until it ends: no other could run."""
    yield
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()


@pytest.fixture(autouse=True)
def main_module_stays() -> Iterator[None]:
    """Puts ``__main__`` back, which Streamlit replaces by its page: a spawned process would run that page again."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with data and a recipe."""
    write_recipe(write_data(tmp_path) / "recipe.json")
    return tmp_path


@pytest.fixture
def signals_of_a_script() -> Iterator[None]:
    """Signals are handled as in every script."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    raise_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """The corpus of the suites: a few files of the standard library, with a tokenizer of 300 ids trained on them.

    Validation is as short as theirs: of the whole file it would take most of a training's time.
    """
    with launches_fork():
        whole = prepare_corpus(REPOSITORY, tmp_path_factory.mktemp("corpus"))
    return cut_validation(whole)


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Token files with documents of 16 ids in the mean."""
    folder = tmp_path_factory.mktemp("short-documents")
    train, val = (write_tokens(folder / f"{n}.bin", random_ids(4000, seed=n, below=16), eot_id=3) for n in range(2))
    return Corpus(train=train, val=val)


@pytest.fixture(scope="session")
def checkpoint_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run of one step; tests only read it."""
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    assert train(command_line(folder, max_train_steps=1)) == 0
    return folder / "run" / "step-00000001"


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both kept, beside its data with a tokenizer whose tokens are bytes; tests only read it."""
    folder = write_inputs(tmp_path_factory.mktemp("two-steps"))
    assert train(command_line(folder, save_every=1)) == 0
    return folder / "run"


@pytest.fixture
def checkpoint(checkpoint_with_tokenizer: Path, tmp_path: Path) -> Path:
    """A copy of it, which the test may change."""
    return shutil.copytree(checkpoint_with_tokenizer, tmp_path / "step-00000001")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-processes", action="store_true", help="skip each test that starts another Python, also by a launcher"
    )


def pytest_configure(config: pytest.Config) -> None:
    starts_workers = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if starts_workers and not config.getoption("--without-processes"):
        start_server()
    if config.getoption("--without-processes") and not starts_workers:
        sys.addaudithook(_skip_at_start)
        lost = "ignore:(?s).*Skipped. starts:pytest.PytestUnhandledThreadExceptionWarning"
        config.addinivalue_line("filterwarnings", lost)  # ``pytest_runtest_makereport`` reports them


STARTERS = {"deepspeed", "torchrun", "streamlit", "bash", "sh", "make"}
"""Programs that are Pythons, or start them."""
_prevented: list[str] = []
"""What the current test was about to start, in any of its threads."""


def _skip_at_start(event: str, about: tuple[Any, ...]) -> None:
    """Skip a test, or all that share its fixture, when it is about to start a Python. So no list of tests is needed.

    While tests are collected, nothing is skipped: a module may ask there what the machine can do.
    """
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ:
        program = Path(os.fsdecode(about[1][0])).name
        if program.startswith("python") or program in STARTERS:
            _prevented.append("starts another Python")
            pytest.skip(_prevented[-1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test as skipped that lost the skip, in a thread or because something caught it, or lacks a package.

    Under ``CI=true`` a test that is left out has failed.
    """
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not MAY_LACK.search(report.longreprtext):
        report.outcome, report.longrepr = "failed", f"under CI=true no test may be left out: {report.longreprtext}"
    reason = _prevented[-1] if _prevented else ""
    if report.failed and os.environ.get("CI") != "true" and (package := lacking(report.longreprtext)):
        reason = f"needs {package}"
    if reason and report.outcome != "skipped":
        report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1], f"Skipped: {reason}")
    _prevented.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with the packages that this machine lacks; the lines above name the tests that were left out for them."""
    left_out = [report for report in terminalreporter.getreports("skipped") if lacking(report.longreprtext)]
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} tests left out; they need, as root: {command()}", yellow=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that share launches before their fixture prepares anything."""
    _prevented.clear()
    shared = SHARED.get(folder_of(item.path)) in getattr(item, "fixturenames", ())
    if shared and item.config.getoption("--without-processes"):
        pytest.skip("starts a launcher")
