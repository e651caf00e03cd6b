"""``ds_configs/sizes``: one recipe for each size, and what the page says about them."""

import json
import re
from typing import Any

import pytest
from small_run import REPOSITORY

from dsgpt.common.errors import Problems
from dsgpt.config.recipe import read_recipe
from dsgpt.model.config import PRESETS

FOLDER = REPOSITORY / "ds_configs"
TUNED = {"train_batch_size", "lr", "betas", "weight_decay", "warmup_num_steps", "cos_min_ratio"}


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def differences(one: Any, two: Any, key: str = "") -> set[str]:
    """The keys at which two recipes differ."""
    if isinstance(one, dict) and isinstance(two, dict):
        return {name for key in one.keys() | two.keys() for name in differences(one.get(key), two.get(key), key)}
    return {key} if one != two else set()


def test_every_size_has_a_recipe():
    assert {path.stem for path in (FOLDER / "sizes").iterdir()} == set(PRESETS)


@pytest.mark.parametrize("size", PRESETS)
def test_it_is_zero1_with_other_settings(size):
    assert differences(read("zero1.json"), read(f"sizes/{size}.json")) <= TUNED
    problems = Problems()
    assert read_recipe(FOLDER / "sizes" / f"{size}.json", problems).zero_stage == 1
    problems.raise_if_any()


@pytest.mark.parametrize("size", PRESETS)
def test_the_page_has_its_settings(size):
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `sizes/{size}.json` \|(.*)\|$", page, flags=re.MULTILINE)[1]
    recipe = read(f"sizes/{size}.json")
    optimizer, schedule = recipe["optimizer"]["params"], recipe["scheduler"]["params"]
    figures = (
        *(recipe["train_batch_size"], optimizer["lr"], schedule["warmup_num_steps"]),
        *(optimizer["betas"][1], schedule["cos_min_ratio"]),
    )
    assert [cell.strip() for cell in row.split("|")][:5] == [f"{figure:g}" for figure in figures]
