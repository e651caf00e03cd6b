"""The recipes of small models are those that the committed search chose, and its page is made from its record."""

import json
from typing import Any

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.recipes import SEARCHES, Trial, recipes_page
from dsgpt.record.provenance import without_sources

RECORD = "checkpoint/reference/cpu-2-cores/recipes.json"


def record() -> dict[str, Any]:
    return json.loads((REPOSITORY / RECORD).read_text(encoding="utf-8"))


@pytest.mark.parametrize("size", SEARCHES)
def test_the_shipped_recipe_is_the_one_that_was_chosen(size):
    trial = next(trial for trial in record()["trials"] if trial["size"] == size and trial["stage"] == "seed")
    chosen = Trial(**{key: trial[key] for key in Trial(batch=1, lr=1).as_dict()}).recipe(steps=trial["steps"])
    shipped = json.loads((REPOSITORY / "ds_configs" / "sizes" / f"{size}.json").read_text(encoding="utf-8"))
    assert shipped.pop("zero_optimization")["stage"] == 1
    assert shipped == chosen


def test_the_committed_page_is_made_from_the_committed_record():
    committed = (REPOSITORY / "docs" / "recipe-search.md").read_text(encoding="utf-8")
    assert without_sources(committed) == recipes_page(record(), source=RECORD)
