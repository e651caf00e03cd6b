"""What the suites share: their command, their records, and the process that forks ranks."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import cpuinfo
import pytest
from git_repository import commit_all, commit_of, write
from messages import without_paths
from small_run import REPOSITORY

from dsgpt.benchmarks.frame import EXIT_FAILED, Record, SuiteCommand, SuiteOptions, SuitePage, make_page, run_suite
from dsgpt.benchmarks.worker import identify_cpu_once
from dsgpt.common.errors import UserError
from dsgpt.machine.console import Console

# What the commands of all suites share: lines, record, page, commit, exit code.


def page_text(record: Record, *, source: str) -> str:
    return f"# Numbers of {source}\n\n{record['numbers']}\n\n## More\n\nNothing.\n"


PAGE = SuitePage(name="parity", of="numbers", text=page_text, summary=lambda record: [f"sum {sum(record['numbers'])}"])


class Numbers(SuiteCommand[int]):
    """Counts from 1; numbers above 2 are failures."""

    page, unit = PAGE, "number"

    def __init__(self, total: int, *, during: Callable[[], object] = lambda: None) -> None:
        self._total, self._during = total, during
        self.folder: Path | None = None

    def plan(self, console: Console) -> int:
        return self._total

    def begin(self, folder: Path, console: Console) -> None:
        self.folder = folder
        (folder / "work").write_text("some")

    def results(self) -> Iterator[int]:
        self._during()
        yield from range(1, self._total + 1)

    def line(self, result: int, *, count: str, left: str) -> str:
        return f"{count} number {result}{' of more' if left else ''}"

    def record(self, results: Sequence[int], *, seconds: float) -> Record:
        return {"git_commit": "abc", "numbers": list(results), "not finite": float("nan")}

    def failures(self, results: Sequence[int], record: Record) -> list[str]:
        return [str(number) for number in results if number > 2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path, "src/gpt2.py")
    commit_all(tmp_path)
    return tmp_path


def options(folder: Path, *, keep: Path | None = None) -> SuiteOptions:
    return SuiteOptions(output=folder / "out" / "numbers.json", page=folder / "numbers.md", keep=keep)


def test_a_run_prints_each_result_and_writes_record_page_and_sources(repository, capsys, snapshot):
    chosen, suite = options(repository), Numbers(2)
    assert run_suite(suite, chosen, repository=repository) == 0
    assert without_paths(capsys.readouterr().out, repository) == snapshot
    recorded = json.loads(chosen.output.read_text())
    expected = {"git_commit": commit_of(repository), "numbers": [1, 2], "not finite": None}
    assert recorded.items() >= expected.items()
    above, _, rest = chosen.page.read_text().partition("\n\nSources: ")
    assert above == f"# Numbers of {chosen.output.as_posix()}\n\n[1, 2]"
    assert rest.endswith("and was up to date when this page was made.\n\n## More\n\nNothing.\n")
    assert suite.folder is not None and not suite.folder.exists()


def test_one_failure_gives_the_exit_code_for_failures(repository, tmp_path):
    kept = tmp_path / "kept"
    assert run_suite(Numbers(3), options(repository, keep=kept), repository=repository) == EXIT_FAILED
    assert (kept / "work").exists()
    with pytest.raises(UserError, match="exists already: give a new folder"):
        run_suite(Numbers(3), options(repository, keep=kept), repository=repository)


@pytest.mark.parametrize(("before", "meanwhile"), [("", "edited"), ("edited", "")])
def test_a_record_says_that_sources_were_not_committed_before_it_or_while_it_was_made(repository, before, meanwhile):
    chosen = options(repository)
    write(repository, "src/gpt2.py", text=before)
    suite = Numbers(1, during=lambda: write(repository, "src/gpt2.py", text=meanwhile))
    run_suite(suite, chosen, repository=repository)
    assert json.loads(chosen.output.read_text())["git_commit"] == f"{commit_of(repository)}-dirty"
    assert "files that were not committed took part).\n" in chosen.page.read_text()


def test_a_page_of_an_old_record_says_what_has_changed(repository):
    chosen = options(repository)
    run_suite(Numbers(1), chosen, repository=repository)
    write(repository, "src/gpt2.py", text="other")
    make_page(PAGE, chosen.output, repository / "again.md", repository=repository)
    assert "1 of 1 sources had changed: src/gpt2.py." in (repository / "again.md").read_text()


# `src/benchmark.py` has a flag for every option of every suite.


SCRIPT = REPOSITORY / "src" / "benchmark.py"
SPECIFICATION = importlib.util.spec_from_file_location("benchmark", SCRIPT)
BENCHMARK = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(BENCHMARK)


@pytest.mark.parametrize("name", BENCHMARK.SUITES)
def test_every_option_of_a_suite_has_a_flag_with_a_default(name, monkeypatch):
    suite, made = BENCHMARK.SUITES[name], []
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), name])
    monkeypatch.setitem(BENCHMARK.SUITES, name, replace(suite, run=lambda options, **_: made.append(options) or 0))
    assert BENCHMARK.main() == 0
    assert isinstance(made[0], suite.options)


def test_inference_with_peers_is_decoding_with_its_flags(monkeypatch):
    made = []
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "inference", "--rounds", "7", "--peers", "--only", "fp32"])
    suite = replace(BENCHMARK.SUITES["decoding"], run=lambda options, **_: made.append(options) or 0)
    monkeypatch.setitem(BENCHMARK.SUITES, "decoding", suite)
    assert BENCHMARK.main() == 0
    assert (made[0].rounds, made[0].only) == (7, ("fp32",))


# What a rank of a suite does once for all its forked cells.


def test_the_cpu_is_identified_once_for_all_cells(monkeypatch):
    """The real function sleeps for a second in every call."""
    calls = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: calls.append("called") or {"vendor_id_raw": "AuthenticAMD"})
    identify_cpu_once()
    assert [cpuinfo.get_cpu_info()["vendor_id_raw"] for _ in range(2)] == ["AuthenticAMD"] * 2
    assert calls == ["called"]
