"""``python src/benchmark.py mutants``: its whole course in a small repository, and planted mutants of our own code."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from git_repository import commit_all
from small_run import REPOSITORY

from dsgpt.benchmarks import mutants
from dsgpt.benchmarks.frame import run_suite
from dsgpt.common.errors import UserError

SOURCE = '''\
def total(values):
    """The sum of those over 2."""
    kept = 0
    for value in values:
        if value > 2:
            kept += value
    return kept


def unused(value: "1 + 1") -> int:
    return -value


def forever(count=3):
    while count:
        count -= 1
    return reduce(count, group="all")


def reduce(value, group=None):
    return value if group else None
'''
TEST = """\
from dsgpt.small import forever, total

def test_total():
    assert total([1, 3, 4]) == 7

def test_forever():
    assert forever() == 0

def test_that_fails_anyhow():
    assert total([]) == 1
"""


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A repository of one file and its test."""
    folder = tmp_path / "repository"
    (folder / "src/dsgpt").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "src/dsgpt/__init__.py").touch()
    (folder / "src/dsgpt/small.py").write_text(SOURCE)
    (folder / "tests/test_small.py").write_text(TEST)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    commit_all(folder)
    changes = {"FILES": ("small.py",), "TESTS": ("test_small.py",), "SLOW_TESTS": (), "WARM": (), "START_SEC": 5}
    changes |= {"PYTEST_WORDS": ("-q",)}
    for name, value in (changes | {"JUDGED": tmp_path / "judged.json"}).items():
        monkeypatch.setattr(mutants, name, value)
    mutants.JUDGED.write_text("{}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of the plugins' imports, a second for each mutant
    return folder


@pytest.mark.long
def test_what_no_test_notices_survives_and_needs_a_reason(small, tmp_path, capsys):
    options = mutants.MutantOptions(output=tmp_path / "out" / "mutants.json")
    assert run_suite(mutants.Mutants, options, repository=small) == 1
    record = json.loads(options.output.read_text())
    ends = {one["name"].partition(": ")[2]: (one["outcome"], one["by"]) for one in record["mutants"]}
    total, forever = "tests/test_small.py::test_total", "tests/test_small.py::test_forever"
    assert ends["total: value > 2 -> (value >= 2)"] == ("survived", "")
    assert ends["total: kept += value -> kept -= value"] == ends["total: 2 -> 3"] == ("caught", total)
    assert ends["forever: count -= 1 -> pass"] == ("timeout", "")
    assert ends['forever: reduce(count, group="all") -> (reduce(count))'] == ("caught", forever)
    assert ends["unused: -value -> (value)"] == ("survived", "")
    assert "SURVIVED: small.py: unused: -value -> (value)" in capsys.readouterr().out
    assert (small / "src/dsgpt/small.py").read_text() == SOURCE

    survived = [one["name"] for one in record["mutants"] if one["outcome"] == "survived"]
    mutants.JUDGED.write_text(json.dumps(dict.fromkeys(survived, "equivalent: nothing calls it")))
    assert run_suite(mutants.Mutants, options, repository=small) == 0
    assert [block["mutants"] for block in json.loads(options.output.read_text())["blocks"]] == [len(ends)]
    assert "**not judged**" not in options.output.with_suffix(".md").read_text()
    with pytest.raises(UserError, match="give --survivors"):
        run_suite(mutants.Mutants, replace(options, tests=("test_total",)), repository=small)
    mutants.JUDGED.write_text(json.dumps({"a": "nobody cares"}))
    with pytest.raises(UserError, match="must begin with one of 'equivalent: '"):
        mutants.judgments()


PLANTED = {
    "data/order.py: shuffled: values >= size -> (values > size)": "test_permutation_of_any_size[7]",
    "data/order.py: shuffled: right + round_key -> (right - round_key)": "test_golden_order",
}
"""Mutants of our own code, and the test that is tried on each."""


@pytest.mark.long
def test_mutants_of_our_own_code_are_caught(tmp_path, monkeypatch):
    """By the tests of this repository."""
    monkeypatch.setattr(mutants, "TESTS", ())
    options = mutants.MutantOptions(output=tmp_path / "mutants.json", mutants=10_000, only=("data/order.py",))
    suite = mutants.Mutants(options, REPOSITORY)
    suite.folder = tmp_path / "work"
    suite.folder.mkdir()
    suite.plan()
    suite.begin()
    for mutant in suite._todo:
        if test := PLANTED.get(mutant.name):
            suite._map = [(f"tests/data/test_tokens.py::{test}", 1.0, {mutant.file: [mutant.line]})]
            end = suite._try(mutant)
            assert (end["outcome"], end["by"]) == ("caught", suite._map[0][0]), (suite.folder / "log.txt").read_text()
    assert {mutant.name for mutant in suite._todo} >= PLANTED.keys()
