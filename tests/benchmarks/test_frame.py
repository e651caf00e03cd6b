"""What the suites share: their command, their records, and the process that forks ranks."""

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cpuinfo
import pytest
from git_repository import commit_all, commit_of, write
from messages import without_paths, without_sources
from small_run import REPOSITORY

from dsgpt.benchmarks.frame import EXIT_FAILED, Record, Suite, SuiteOptions, make_page, run_suite
from dsgpt.benchmarks.launch import identify_cpu_once
from dsgpt.benchmarks.records import RECORDS
from dsgpt.common.errors import UserError

# What the commands of all suites share: lines, record, page, commit, exit code.


def page_text(record: Record, *, source: str) -> str:
    return f"# Numbers of {source}\n\n{record['numbers']}\n\n## More\n\nNothing.\n"


@dataclass(frozen=True, kw_only=True)
class NumbersOptions(SuiteOptions):
    total: int
    during: Callable[[], object] = lambda: None


class Numbers(Suite[NumbersOptions, int]):
    """Counts from 1; numbers above 2 are failures."""

    name, record_of, schema_version, unit = "parity", "numbers", "1.0", "number"
    page = staticmethod(page_text)
    folders: ClassVar[list[Path]] = []

    @staticmethod
    def summary(record: Record) -> list[str]:
        return [f"sum {sum(record['numbers'])}"]

    def plan(self) -> int:
        return self.options.total

    def begin(self) -> None:
        self.folders.append(self.folder)
        (self.folder / "work").write_text("some")

    def results(self) -> Iterator[int]:
        self.options.during()
        yield from range(1, self.options.total + 1)

    def line(self, result: int, *, count: str, left: str) -> str:
        return f"{count} number {result}{' of more' if left else ''}"

    def record(self, results: Sequence[int]) -> Record:
        return {"numbers": list(results), "not finite": float("nan")}

    def failures(self, record: Record) -> list[str]:
        return [str(number) for number in record["numbers"] if number > 2]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path, "src/gpt2.py")
    commit_all(tmp_path)
    return tmp_path


def options(folder: Path, total: int, **more: Any) -> NumbersOptions:
    return NumbersOptions(output=folder / "out" / "numbers.json", page=folder / "numbers.md", total=total, **more)


def test_a_run_prints_each_result_and_writes_record_page_and_sources(repository, capsys, snapshot):
    chosen = options(repository, 2)
    assert run_suite(Numbers, chosen, repository=repository) == 0
    assert without_paths(capsys.readouterr().out, repository) == snapshot
    recorded = json.loads(chosen.output.read_text())
    expected = {"schema_version": "1.0", "git_commit": commit_of(repository), "numbers": [1, 2], "not finite": None}
    assert recorded.items() >= expected.items()
    above, _, rest = chosen.page.read_text().partition("\n\nSources: ")
    assert above == f"# Numbers of {chosen.output.as_posix()}\n\n[1, 2]"
    assert rest.endswith("and was up to date when this page was made.\n\n## More\n\nNothing.\n")
    assert not Numbers.folders[-1].exists()


def test_one_failure_gives_the_exit_code_for_failures(repository, tmp_path):
    kept = tmp_path / "kept"
    assert run_suite(Numbers, options(repository, 3, keep=kept), repository=repository) == EXIT_FAILED
    assert (kept / "work").exists()
    with pytest.raises(UserError, match="exists already: give a new folder"):
        run_suite(Numbers, options(repository, 3, keep=kept), repository=repository)


@pytest.mark.parametrize(("before", "meanwhile"), [("", "edited"), ("edited", "")])
def test_a_record_says_that_sources_were_not_committed_before_it_or_while_it_was_made(repository, before, meanwhile):
    write(repository, "src/gpt2.py", text=before)
    chosen = options(repository, 1, during=lambda: write(repository, "src/gpt2.py", text=meanwhile))
    run_suite(Numbers, chosen, repository=repository)
    assert json.loads(chosen.output.read_text())["git_commit"] == f"{commit_of(repository)}-dirty"
    assert "files that were not committed took part).\n" in chosen.page.read_text()


def test_a_page_of_an_old_record_says_what_has_changed(repository):
    chosen = options(repository, 1)
    run_suite(Numbers, chosen, repository=repository)
    write(repository, "src/gpt2.py", text="other")
    again = options(repository, 1, table_from=chosen.output)
    run_suite(Numbers, again, repository=repository)
    assert "1 of 1 sources had changed: src/gpt2.py." in again.page.read_text()


# `src/benchmark.py` has a flag for every option of every suite.


SCRIPT = REPOSITORY / "src" / "benchmark.py"
SPECIFICATION = importlib.util.spec_from_file_location("benchmark", SCRIPT)
BENCHMARK = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(BENCHMARK)


@pytest.mark.parametrize("name", BENCHMARK.SUITES)
def test_every_option_of_a_suite_has_a_flag_with_a_default(name, monkeypatch):
    made = []
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), name])
    monkeypatch.setattr(BENCHMARK, "run_suite", lambda suite, options, **_: made.append((suite, options)) or 0)
    assert BENCHMARK.main() == 0
    assert made[0][0] is BENCHMARK.SUITES[name]
    assert isinstance(made[0][1], made[0][0].flags)


@pytest.mark.parametrize("suite", BENCHMARK.SUITES.values(), ids=lambda suite: suite.name)
def test_a_record_that_is_not_there_is_a_mistake_of_the_user(suite, tmp_path):
    words = f"cannot be read as a record of {suite.record_of}: No such file or directory"
    with pytest.raises(UserError, match=words):
        make_page(suite, tmp_path / "none.json", tmp_path / "page.md", repository=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_inference_with_peers_is_decoding_with_its_flags(monkeypatch):
    made = []
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "inference", "--rounds", "7", "--peers", "--only", "fp32"])
    monkeypatch.setattr(BENCHMARK, "run_suite", lambda suite, options, **_: made.append((suite, options)) or 0)
    assert BENCHMARK.main() == 0
    suite, options = made[0]
    assert (suite.name, options.rounds, options.only) == ("decoding", 7, ("fp32",))


SHOWN = [record for record in RECORDS.values() if "--table-from" in record.show]


@pytest.mark.parametrize("record", SHOWN, ids=lambda record: record.name)
def test_the_committed_page_is_made_from_the_committed_record(record):
    words = dict(itertools.pairwise(record.show))
    source, page = words["--table-from"], (REPOSITORY / words["--page"]).read_text(encoding="utf-8")
    values = json.loads((REPOSITORY / source).read_text(encoding="utf-8"))
    assert without_sources(page) == without_sources(BENCHMARK.SUITES[record.show[1]].page(values, source=source))


# What a rank of a suite does once for all its forked cells.


def test_the_cpu_is_identified_once_for_all_cells(monkeypatch):
    """The real function sleeps for a second in every call."""
    calls = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: calls.append("called") or {"vendor_id_raw": "AuthenticAMD"})
    identify_cpu_once()
    assert [cpuinfo.get_cpu_info()["vendor_id_raw"] for _ in range(2)] == ["AuthenticAMD"] * 2
    assert calls == ["called"]
