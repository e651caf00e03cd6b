"""The museum: what it calls noticed, and how it goes on. Its trainings run beside those of ``test_parity_core.py``."""

import importlib
import json

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks import frame, museum
from dsgpt.benchmarks.cells import Cell

museum.load()
BUG = museum.Exhibit(
    thread="a/Trainer/issues/7", year=2024, effect="It was wrong.", mechanism="It forgets.",
    where=Cell(strategy="ddp", ranks=2),
)  # fmt: skip
PASSED = {"status": "passed", "message": None, "failures": [], "seconds": 1.0}
NORM = {"fact": "gradient norm", "where": "step 2", "expected": 1.0, "actual": 2.0, "difference": 1.0, "bound": 0.01}
WEIGHTS = {"fact": "weights", "where": "wte.weight", "expected": 1.0, "actual": 9.0, "difference": 8.0, "bound": 1e-6}
FAILED = PASSED | {"status": "failed", "failures": [WEIGHTS, NORM]}


@pytest.mark.parametrize(
    ("without", "broken", "status"),
    [
        (PASSED, FAILED, "caught"),
        (PASSED, PASSED, "missed"),
        (FAILED, FAILED, "not clean"),
        (PASSED, PASSED | {"status": "error", "message": "RuntimeError: gone"}, "error"),
    ],
)
def test_noticed_means_that_it_passes_without_the_bug(without, broken, status):
    assert museum.compared(BUG, without, broken)["status"] == status


def test_the_fact_that_shows_first_is_shown():
    result = museum.compared(BUG, PASSED, FAILED)
    assert (result["check"], result["step"], result["measured"], result["bound"]) == (
        "parity: gradient norm",
        2,
        1.0,
        0.01,
    )


def test_a_refusal_counts_only_if_it_is_expected():
    refused = PASSED | {"status": "refused", "message": "DeepSpeed 0.18.2: issues/7718"}
    assert museum.compared(BUG, PASSED, refused)["status"] == "error"
    expected = museum.replace(BUG, ends="issues/7718")
    assert museum.compared(expected, PASSED, refused)["status"] == "caught"


def test_a_line_that_the_library_no_longer_has_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "library_of_test.py").write_text(
        "class Engine:\n    def __step(self):\n        return 1 + self.__one()\n\n"
        "    def __one(self):\n        return 1\n\n    def step(self):\n        return self.__step()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    engine = importlib.import_module("library_of_test").Engine()
    with museum.edited("library_of_test:Engine", "__step", "1 + ", "2 + ")():
        assert engine.step() == 3
    assert engine.step() == 2
    with pytest.raises(LookupError, match="has 0 times"):
        museum.edited("library_of_test:Engine", "__step", "3 + ", "2 + ")()


def test_the_museum_goes_on_where_it_stopped(tmp_path, monkeypatch):
    output, ran = tmp_path / "museum.json", []
    names = list(museum.EXHIBITS)[:3]
    monkeypatch.setattr(museum, "EXHIBITS", {name: museum.EXHIBITS[name] for name in names})

    def results(suite):
        for exhibit in suite._todo:
            ran.append(exhibit.name)
            yield museum.compared(exhibit, PASSED, PASSED if exhibit.name == names[1] and len(ran) < 3 else FAILED)

    monkeypatch.setattr(museum.Museum, "results", results)
    for minutes in (0.0, 40.0, 40.0):
        options = museum.MuseumOptions(output=output, minutes=minutes)
        code = frame.run_suite(museum.Museum, options, repository=REPOSITORY)
    record = json.loads(output.read_text(encoding="utf-8"))
    assert ran == [names[0], names[1], names[2], names[1]]  # one was not noticed, and is tried again
    assert [one["name"] for one in record["exhibits"]] == names
    assert [one["exhibits"] for one in record["blocks"]] == [1, 2, 1]
    assert code == 0
    page = output.with_suffix(".md").read_text(encoding="utf-8")
    assert "3 of 3" in page and "gradient norm off by 1.0e+00, 100 times the bound" in page


def test_every_exhibit_says_what_it_is():
    for name, exhibit in museum.EXHIBITS.items():
        assert bool(exhibit.where) != bool(exhibit.absent), name
        assert exhibit.effect.endswith(".")
        assert exhibit.mechanism.endswith(".")


def test_every_bug_finds_its_place():
    for exhibit in museum.EXHIBITS.values():
        with exhibit.plant():
            pass
