"""``src/benchmark.py`` has a flag for every option of every suite."""

import importlib.util
import sys
from dataclasses import replace

import pytest
from small_run import REPOSITORY

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
