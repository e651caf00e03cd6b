"""The time of a training and its cost, by hand; and the price table."""

import datetime
import json
from dataclasses import replace

import pytest
from round_machine import machine

from dsgpt.common.errors import UserError
from dsgpt.planner.hardware import PRICES as TABLE
from dsgpt.planner.hardware import costs, gpus, own_cost, read_prices
from dsgpt.planner.setup import model_parameters, total
from dsgpt.planner.step_time import START_SEC, Length, predict_step, run_time


def test_steps_validations_and_checkpoints(setup):
    """12 sequences of 4 tokens a step; a validation of 96 tokens is 6 micro batches on each of 2 ranks."""
    ddp = setup(run_type="ddp")
    step = predict_step(ddp, machine())
    length = Length(tokens=48 * 100 + 47, eval_every=10, val_tokens=96, save_every=40)
    found = run_time(ddp, machine(), step, length)
    assert found.steps == 100
    assert found.parts["steps"] == pytest.approx(100 * step.seconds)
    assert found.parts["validation"] == pytest.approx(10 * 6 * step.validation_micro_batch)
    assert found.parts["checkpoints"] == pytest.approx(3 * 12 * total(model_parameters(ddp.model)) / 1e6)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.parts["start"] == START_SEC
    assert found.least < found.seconds < found.most
    only_at_the_end = run_time(ddp, machine(), step, Length(tokens=48 * 100))
    assert only_at_the_end.parts["checkpoints"] == pytest.approx(found.parts["checkpoints"] / 3)
    assert "validation" not in only_at_the_end.parts
    seldom = run_time(ddp, machine(), step, replace(length, eval_every=30))  # after 30, 60, 90 and 100 steps
    assert seldom.parts["validation"] == pytest.approx(4 * 6 * step.validation_micro_batch)


def test_cost_of_whole_instances():
    table = read_prices()
    offers = {cost.offer: cost for cost in costs(table, gpu="t4", gpus=4, together=4, spot=False, **_hours(3))}
    aws = offers["AWS g4dn.12xlarge"]
    assert (aws.usd, aws.least, aws.most) == pytest.approx((3 * 3.912, 3.912, 9 * 3.912))
    assert offers["AWS g4dn.metal"].usd == pytest.approx(3 * 7.824)  # all of its 8 GPUs are paid
    assert "AWS g4dn.xlarge" not in offers  # four machines are not one
    two = costs(table, gpu="h100-80gb", gpus=16, together=8, spot=False, **_hours(1))
    p5 = next(cost for cost in two if cost.offer == "AWS p5.48xlarge")
    assert (p5.instances, p5.usd) == (2, pytest.approx(2 * 98.32))
    assert [cost.usd for cost in two] == sorted(cost.usd for cost in two)


def _hours(count: float) -> dict[str, float]:
    return {"seconds": 3600 * count, "least": 1200 * count, "most": 10_800 * count}


def test_own_price_and_spot_prices():
    assert own_cost(0.5, gpus=8, **_hours(2)).usd == pytest.approx(8.0)
    on_spot = costs(read_prices(), gpu="a100-40gb", gpus=1, together=1, spot=True, **_hours(1))
    assert on_spot
    listed = {price.instance for price in read_prices().prices if price.spot_usd_per_hour}
    assert {cost.offer.removesuffix(", spot").split()[-1] for cost in on_spot} <= listed


def test_every_row_of_the_table_is_dated_sourced_and_of_a_known_gpu():
    table = read_prices()
    for price in table.prices:
        assert price.gpu in gpus(), price
        assert datetime.date.fromisoformat(price.known_on) < datetime.date(2026, 12, 1)
        assert price.source.startswith("https://")
        if price.spot_usd_per_hour is not None:
            assert price.spot_usd_per_hour < price.on_demand_usd_per_hour
    assert {price.provider for price in table.prices} == {"AWS", "Google Cloud", "Azure", "Lambda"}
    assert len({(price.provider, price.instance) for price in table.prices}) == len(table.prices)
    assert "not fetched" in table.notice


def test_a_table_of_the_users(tmp_path):
    table = json.loads(TABLE.read_text())
    table["prices"] = [table["prices"][0] | {"on_demand_usd_per_hour": 1.0}]
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(table))
    assert [price.on_demand_usd_per_hour for price in read_prices(path).prices] == [1.0]
    table["prices"][0]["on_demand_usd_per_hour"] = -1.0
    path.write_text(json.dumps(table))
    with pytest.raises(UserError, match=r"prices\.json: cannot be read as a price table .*on_demand_usd_per_hour"):
        read_prices(path)


def test_a_checkpoint_of_sgd_has_no_moments(setup):
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    plain, with_moments = setup(run_type="ddp", top=sgd), setup(run_type="ddp")
    times = [
        run_time(each, machine(), predict_step(each, machine()), Length(tokens=48)).parts["checkpoints"]
        for each in (plain, with_moments)
    ]
    assert times[1] == pytest.approx(3 * times[0])
