"""What the suites share: their command, their records and their pages."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from git_repository import commit_all, commit_of, write

from dsgpt.benchmarks import frame, suites
from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, made_from, run_suite
from dsgpt.common.errors import UserError

# What the commands of all suites share: lines, record, page, commit, exit code.


@dataclass(frozen=True, kw_only=True)
class NoneOptions(SuiteOptions):
    during: Callable[[], object] = lambda: None


class Nothing(Suite[NoneOptions, int]):
    """A suite without results."""

    name, record_of, schema_version, unit = "parity", "nothing", "1.0", "number"
    page = staticmethod(lambda _record, *, source: f"# Of {source}\n\n## More\n")
    summary = staticmethod(lambda _record: [])

    def plan(self) -> int:
        return 0

    def results(self) -> Iterator[int]:
        self.options.during()
        return iter(())

    def line(self, result: int, *, count: str, left: str) -> str:
        return ""

    def record(self, results: Sequence[int]) -> Record:
        return {"not finite": float("nan")}


def test_record_and_page_say_which_sources_changed_and_when(tmp_path):
    """Not committed before the run or while it lasted, or changed since."""
    write(tmp_path, "src/gpt2.py")
    commit_all(tmp_path)
    output, page = tmp_path / "out" / "record.json", tmp_path / "out" / "record.md"

    def made(**more: Any) -> tuple[Record, str]:
        options = NoneOptions(output=output, keep=tmp_path / f"kept-{len(list(tmp_path.iterdir()))}", **more)
        assert run_suite(Nothing, options, repository=tmp_path) == 0
        return json.loads(output.read_text()), page.read_text()

    commit = commit_of(tmp_path)
    record, text = made()
    assert record.items() >= {"schema_version": "1.0", "git_commit": commit, "not finite": None}.items()
    assert text.startswith(f"# Of {output.as_posix()}\n\nSources: ")
    assert "and was up to date when this page was made.\n\n## More\n" in text
    record, text = made(during=lambda: write(tmp_path, "src/gpt2.py", text="edited meanwhile"))
    assert record["git_commit"] == f"{commit}-dirty"
    assert "files that were not committed took part).\n" in text
    record, _ = made(during=lambda: write(tmp_path, "src/gpt2.py"))
    assert record["git_commit"] == f"{commit}-dirty"
    made()
    write(tmp_path, "src/gpt2.py", text="other")
    assert "1 of 1 sources had changed: src/gpt2.py." in made(table_from=output)[1]
    with pytest.raises(UserError, match="exists already: give a new folder"):
        run_suite(Nothing, NoneOptions(output=output, keep=tmp_path), repository=tmp_path)


@dataclass(frozen=True, kw_only=True)
class GrowingOptions(NoneOptions):
    minutes: float = 40.0
    numbers: tuple[int, ...] = (1, 2, 3)


class Growing(Nothing):
    """A suite whose record grows in blocks. Its results are its numbers."""

    counted, page = "numbers", staticmethod(lambda record, *, source: made_from(record, source=source, name="parity"))

    def plan(self) -> int:
        names = [f"n{number}" for number in self.options.numbers]
        self._earlier = self.kept(self.earlier.get("numbers", ()), names)
        self._left = [number for number in self.options.numbers if f"n{number}" not in self._earlier]
        return len(self._left)

    def results(self) -> Iterator[int]:
        return iter(self._left)

    def record(self, results: Sequence[int]) -> Record:
        return {"numbers": [*self._earlier.values(), *({"name": f"n{number}"} for number in results)]}


def test_a_record_that_grows_names_the_commit_of_each_block_and_is_as_old_as_the_first(tmp_path, monkeypatch):
    write(tmp_path, "src/gpt2.py")
    commit_all(tmp_path)
    first, output = commit_of(tmp_path), tmp_path / "record.json"

    def made(busy: float, **more: Any) -> tuple[Record, str]:
        monkeypatch.setattr(frame.LoadOfOthers, "figures", lambda _: {"cpu_share_of_others": busy})
        assert run_suite(Growing, GrowingOptions(output=output, **more), repository=tmp_path) == 0
        return json.loads(output.read_text()), output.with_suffix(".md").read_text()

    made(0.9, minutes=0.0)
    write(tmp_path, "src/gpt2.py", text="other")
    commit_all(tmp_path)
    made(0.1)
    record, text = made(0.0)  # nothing is left to do
    assert [(one["git_commit"], one["numbers"]) for one in record["blocks"]] == [(first, 1), (commit_of(tmp_path), 2)]
    assert f"Commits `{first[:12]}`, `{commit_of(tmp_path)[:12]}`, " in text
    assert "1 of 1 sources had changed: src/gpt2.py." in text
    assert "other processes used 90% of the CPUs" in text
    with pytest.raises(UserError, match=r"has 2 results that this command does not plan, such as n1: give the same"):
        made(0.0, numbers=(3, 4))
    output.write_text("{broken")
    with pytest.raises(UserError, match=r"--output .*record\.json: .*give another file"):
        made(0.0)


# `src/benchmark.py` has a flag for every option of every suite.


@pytest.mark.parametrize("words", [[name] for name in suites.SUITES] + [["inference", "--rounds", "7", "--peers"]])
def test_every_option_of_a_suite_has_a_flag_with_a_default(words, monkeypatch):
    """``inference --peers`` is ``decoding``."""
    made = []
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *words])
    monkeypatch.setattr(suites, "run_suite", lambda suite, options, **_: made.append((suite, options)) or 0)
    assert suites.main() == 0
    ((suite, options),) = made
    assert suite is suites.suite_of("decoding" if "--peers" in words else words[0])
    assert isinstance(options, suite.flags)
    assert len(words) == 1 or options.rounds == 7
