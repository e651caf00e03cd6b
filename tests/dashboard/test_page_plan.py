"""Plan and cost: every figure is what ``src/plan.py`` prints for the command that the page shows."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from opened_pages import open_page
from small_run import REPOSITORY

from dsgpt.charts.plan import draw_plan
from dsgpt.dashboard.plans import (
    command_line,
    gpus_table,
    machines,
    offers,
    offers_table,
    on_other_gpus,
    parts_table,
    planned,
    recommended_files,
    ways_table,
)
from dsgpt.planner.command import act
from dsgpt.planner.hardware import read_prices
from dsgpt.planner.options import PlanOptions, read_plan_options, words_of
from dsgpt.planner.plan import dollars, duration, size, with_assumptions

RECORD = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "plan.json"
ONE = PlanOptions(
    model_size="medium",
    run_type="optimized",
    deepspeed_config=Path("ds_configs/zero2.json"),
    gpu="a100-80gb",
    gpus=8,
    tokens=3e9,
)
BEST = PlanOptions(model_size="small", gpu="l4", gpus=2, tokens=1e9, recommend=True, deadline=5 * 3600.0, budget=18.0)


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """What ``src/plan.py`` prints with ``--json``."""
    options, problems = read_plan_options([*words, "--json"])
    assert act(options, problems, repository=REPOSITORY, draw=draw_plan) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "options",
    [
        ONE,
        BEST,
        PlanOptions(
            machine=RECORD, measured=(RECORD,), gpus=2, tokens=1e7, activation_checkpointing=True, save_every=0
        ),
        PlanOptions(gpu="t4", tokens=12345.5, deadline=5400.0, recommend=True, spot=True, network_gbps=12.5),
    ],
)
def test_the_command_says_what_the_page_asked_for(options):
    found, problems = read_plan_options(words_of(options))
    assert not problems
    assert found == options
    assert shlex.split(command_line(options)) == [".venv/bin/python", "src/plan.py", *words_of(options)]


def test_what_does_not_fit_is_the_loud_thing(tmp_path, monkeypatch):
    page = open_page("plan", tmp_path, monkeypatch)
    assert not page.error
    page.selectbox(key="plan-model").set_value("xl").run()
    page.select_slider(key="plan-count").set_value(1).run()
    page.number_input(key="plan-micro").set_value(32).run()
    assert not page.metric
    assert page.error[0].value.startswith("### DOES NOT FIT\n")


def test_one_setup_is_planned_as_on_the_command_line(capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    done = planned(words_of(ONE), repository=REPOSITORY)
    assert with_assumptions(done.plan) == printed(words_of(ONE), capsys)


def test_a_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert planned(words_of(ONE), repository=REPOSITORY).plan.setup.recipe.zero_stage == 2


def test_the_recommendation_is_what_the_command_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = planned(words_of(BEST), repository=REPOSITORY)
    told = printed(words_of(BEST), capsys)
    assert told["recommended"] == {"name": done.best.name, "plan": with_assumptions(done.plan)}
    files = recommended_files(done)
    assert [path.as_posix() for path in files] == told["written"]
    assert {path: path.read_bytes() for path in files} == files
    ways = ways_table(done.found)
    assert ways["way"] == [each["name"] for each in (*told["ranked"], *told["refused"])]
    assert told["ranked"]
    assert told["refused"]
    assert ways["why not"] == [""] * len(told["ranked"]) + [each["reason"] for each in told["refused"]]


def test_offers_of_both_kinds_have_their_dates():
    done = planned(words_of(replace(ONE, gpu="a100-40gb")), repository=REPOSITORY)
    spot = planned(words_of(replace(ONE, gpu="a100-40gb", spot=True)), repository=REPOSITORY)
    table = offers_table(offers(done))
    for kind, same in (("on demand", done), ("spot", spot)):
        found = [usd for usd, each in zip(table["US dollars"], table["price"], strict=True) if each == kind]
        assert found == pytest.approx([cost.usd for cost in same.plan.costs], abs=0.005)
        assert found
    assert set(table["list price of"]) <= {price.known_on for price in read_prices().prices}
    assert table["US dollars"] == sorted(table["US dollars"])


def test_other_gpus_have_their_own_plan_or_a_reason():
    done = planned([*words_of(ONE), "--precision", "bf16"], repository=REPOSITORY)
    table = gpus_table(on_other_gpus(done, repository=REPOSITORY))
    same = table["GPU"].index("a100-80gb")
    assert table["training, hours"][same] == pytest.approx(done.plan.run.seconds / 3600, abs=0.005)
    assert "has no units for it" in table["fits"][table["GPU"].index("t4")]


def test_parts_add_up():
    done = planned(words_of(ONE), repository=REPOSITORY)
    table = parts_table(done.plan.peak.parts, "GB", scale=1e-9)
    assert sum(table["GB"]) == pytest.approx(done.plan.peak.total / 1e9)
    assert sum(table["share"]) == pytest.approx(1)


def test_a_measured_machine_is_planned_for_with_its_own_steps(tmp_path, capsys):
    place = tmp_path / "reference" / "mine" / "plan.json"
    place.parent.mkdir(parents=True)
    shutil.copy(RECORD, place)
    (measured, *table), broken = machines(tmp_path)
    assert not broken
    assert measured.is_measured
    assert measured.devices == 2
    assert not any(each.is_measured for each in table)
    options = PlanOptions(**dict(measured.flags), model_size="tiny", gpus=2, tokens=1e7)
    done = planned(words_of(options), repository=REPOSITORY)
    assert not done.plan.machine.assumed
    assert "fitted to measured steps" in done.plan.machine.basis
    assert with_assumptions(done.plan) == printed(words_of(options), capsys)


def test_a_broken_calibration_hides_nothing_else(tmp_path):
    (tmp_path / "calibration.json").write_text("{", encoding="utf-8")
    found, broken = machines(tmp_path)
    assert {"t4", "h100-80gb"} <= {each.name for each in found}
    assert len(broken) == 1
    assert "calibration.json" in broken[0]


def test_the_page_shows_the_figures_of_its_own_command(tmp_path, capsys, monkeypatch):
    page = open_page("plan", tmp_path, monkeypatch)
    page.select_slider(key="plan-tokens").set_value(3e9).run()
    (command,) = [code.value for code in page.code if "src/plan.py" in code.value]
    told = printed(
        [word.replace("ds_configs", f"{REPOSITORY}/ds_configs") for word in shlex.split(command)[2:]], capsys
    )
    shown = {metric.label: metric.value for metric in page.metric}
    assert shown == {
        "Memory of a device": size(told["memory"]["bytes"]),
        "Tokens/s": f"{told['step']['tokens_per_sec']:,.0f}",
        "Training": duration(told["training"]["seconds"]),
        "Cost": dollars(told["costs"][0]["usd"]),
    }
    assert "Not measured" in page.info[0].value
    page.selectbox(key="plan-strategy").set_value("ZeRO++").run()
    assert not page.exception
    assert "no formula predicts Zero" in page.error[0].value
