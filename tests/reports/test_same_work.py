"""Everything that changes the training counts: tested on two records for each option, recipe key and model field.

The program writes the records, for runs that the tests resolve and do not train.
"""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from changed_alone import CHANGED, DYNAMIC, in_fp16, quantized
from real_records import Asked, run_of
from small_run import REPOSITORY, SEQUENCE, TOKENS, random_ids, write_tokens

from dsgpt.config.options import Options
from dsgpt.config.recipe import Recipe
from dsgpt.config.recipe_blocks import Block
from dsgpt.config.same_work import LATER_FACTS, TRAINING_FACTS, WORK_FACTS, ChangesTraining, ExecutionOnly
from dsgpt.model.config import GPT2Config
from dsgpt.record.equal_work import judge
from dsgpt.record.runs import Run, read_run
from dsgpt.training import run_description


def _declared() -> dict[str, ChangesTraining | ExecutionOnly | None]:
    """What every flag, every key of a recipe and every field of the model declares; names as in ``CHANGED``."""
    found = {f"--{each.name}": each.metadata["work"] for each in fields(Options)}
    found |= {f"model.{each.name}": ChangesTraining(f"model {each.name}") for each in fields(GPT2Config)}
    return found | _keys(Recipe, "recipe")


def _keys(block: type[Block], name: str) -> dict[str, ChangesTraining | ExecutionOnly | None]:
    found: dict[str, ChangesTraining | ExecutionOnly | None] = {}
    hints = get_type_hints(block, include_extras=True)
    for key, hint in ((each.name, hints[each.name]) for each in fields(block)):
        kinds = [kind for kind in (hint, *_parts(hint)) if isinstance(kind, type) and issubclass(kind, Block)]
        if kinds:
            found |= _keys(kinds[0], key)
        else:
            own = [each for each in _parts(hint) if isinstance(each, ChangesTraining | ExecutionOnly)]
            found[f"{name}.{key}"] = own[0] if own else block.WORK
    return found


def _parts(hint: Any) -> list[Any]:
    """Everything that a hint is made of."""
    parts = [*get_args(hint), *getattr(hint, "__metadata__", ())]
    return [each for one in parts for each in (one, *_parts(one))]


DECLARED = _declared()
CHANGES = {name: work.facts for name, work in DECLARED.items() if isinstance(work, ChangesTraining)}
EXECUTION_ONLY = [name for name, work in DECLARED.items() if isinstance(work, ExecutionOnly)]


def test_every_flag_and_key_declares_what_it_means_for_equal_work():
    assert DECLARED.keys() == CHANGES.keys() | {*EXECUTION_ONLY}
    assert {fact for facts in CHANGES.values() for fact in facts} <= {*WORK_FACTS, *TRAINING_FACTS}
    assert len(DECLARED) > 150
    assert {"--dropout", "fsdp.reduce_dtype", "offload_param.buffer_size", "aio.block_size"} < DECLARED.keys()


@pytest.fixture(autouse=True)
def _known_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking git would take longer than the rest of these tests."""
    monkeypatch.setattr(run_description, "git_commit", lambda: "0" * 40)


def pair(folder: Path, name: str) -> list[Run]:
    one, other = CHANGED[name]
    assert one != other
    return [run_of(folder / "a", one, name="a"), run_of(folder / "b", other, name="b")]


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"--train_data_path", "--val_data_path"}))
def test_a_difference_that_counts_is_other_work(tmp_path, name):
    verdict = judge(pair(tmp_path, name))
    assert verdict.answer == "no"
    assert any(difference.fact.startswith(CHANGES[name]) for difference in verdict.differences), verdict.line()


@pytest.mark.parametrize("name", sorted(EXECUTION_ONLY))
def test_a_harmless_difference_is_the_same_work(tmp_path, name):
    assert judge(pair(tmp_path, name)).line() == "same work: yes"


@pytest.mark.parametrize("name", ["train", "val"])
def test_other_data_counts(tmp_path, name):
    other = write_tokens(tmp_path / "other.bin", random_ids(TOKENS, seed=9))
    asked = Asked(), Asked(flags={f"{name}_data_path": other})
    verdict = judge([run_of(tmp_path / side, each, name=side) for side, each in zip("ab", asked, strict=True)])
    assert verdict.answer == "no"
    assert {difference.fact for difference in verdict.differences} >= {CHANGES[f"--{name}_data_path"][0]}


def test_ids_of_another_width_are_other_data(tmp_path):
    """The same bytes, and so the same sha256, read as half as many ids."""
    ids = random_ids(2 * TOKENS - 1)
    ids[1::2] = 0
    narrow = write_tokens(tmp_path / "narrow" / "train.bin", ids[:-1])
    wide = write_tokens(tmp_path / "wide" / "train.bin", ids[:-1], dtype="uint32", tokens=TOKENS - 1)
    asked = [Asked(flags={"train_data_path": path}) for path in (narrow, wide)]
    verdict = judge([run_of(tmp_path / side, each, name=side) for side, each in zip("ab", asked, strict=True)])
    assert verdict.line() == f"same work: no (tokens in the train file {2 * TOKENS - 2:,} vs {TOKENS - 1:,})"


def test_a_decay_to_the_end_of_the_run_is_as_long_as_the_run(tmp_path):
    """One run stopped after the number of steps that the other had in all."""

    def stopped(record: dict[str, Any]) -> None:
        record["summary"].update(optimizer_steps=2, tokens_processed_global=2 * 8 * SEQUENCE)

    whole = run_of(tmp_path / "a", Asked(), name="a")
    part = run_of(tmp_path / "b", Asked(flags={"max_train_steps": 4}), name="b", change=stopped)
    assert judge([whole, part]).line() == "same work: no (scheduler total_num_steps 2 vs 4)"


@pytest.mark.parametrize("fact", sorted(LATER_FACTS))
def test_a_fact_that_one_record_lacks_is_unknown(tmp_path, fact):
    """Records of an earlier version lack it. If both lack it, it is not compared, except between resumed runs."""
    places: dict[str, Callable[[dict[str, Any]], Any]] = {
        "tokens in the train file": lambda record: record["data"].pop("train_tokens"),
        "tokens in the validation file": lambda record: record["data"].pop("val_tokens"),
        "validation windows": lambda record: record["training_config"].pop("val_windows"),
        "optimizer settings": lambda record: record["training_config"].pop("optimizer_params"),
        "initial weights": lambda record: record["training_config"].pop("init_from"),
        "loss scaling": lambda record: record["training_config"].pop("loss_scaling"),
        "quantized communication": lambda record: (
            record.pop("segments"),
            record["training_config"].pop("quantized_weights"),
            record["deepspeed_config"].pop("given"),
        ),
        "changed at resume": lambda record: (record.pop("changed_at_resume"), record.update(resumed_from="step-1")),
    }
    fp16 = Asked(recipe=DYNAMIC, elsewhere=True, adapt=in_fp16)  # other precisions have no loss scaling
    new = run_of(tmp_path / "new", fp16, name="new")
    old = run_of(tmp_path / "old", fp16, name="old", change=places[fact])
    assert judge([new, old]).line() == f"same work: unknown (old did not record {fact})"
    assert judge([old, old]).answer == ("unknown" if fact == "changed at resume" else "yes")


@pytest.mark.parametrize("other", ["quantized", "plain"])
def test_facts_that_an_earlier_version_recorded_elsewhere_are_found(tmp_path, other):
    """Zero++ is in the JSON as given; the precision shows whether the loss was scaled; no resume, no changes at one."""

    def earlier(record: dict[str, Any]) -> None:
        for key in ("loss_scaling", "quantized_weights", "quantized_gradients"):
            del record["training_config"][key]
        del record["changed_at_resume"], record["segments"]

    first, second = quantized("weights")
    new, old = (first, second) if other == "quantized" else (first, first)
    verdict = judge([run_of(tmp_path / "a", new, name="a"), run_of(tmp_path / "b", old, name="b", change=earlier)])
    expected = "no (quantized communication none vs weights)" if old is second else "yes"
    assert verdict.line() == f"same work: {expected}"


def test_the_committed_records_did_the_same_work():
    folder = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores"
    runs = [read_run(folder / f"demo-{name}", name=name) for name in ("baseline", "zero1")]
    assert judge(runs).line() == "same work: yes"
    assert json.loads((folder / "demo-zero1" / "training_metrics.json").read_text())["schema_version"] == "2.1"
