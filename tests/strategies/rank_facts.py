"""What the tests of DDP and of FSDP share: one launch for many facts, and assertions that hold for both."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import run_script
from training_runs import SHAPE, data_flags, finished, write_optimizer_recipe

from dsgpt.benchmarks.cells import Corpus

RANKS, ACCUMULATION, LAYERS = 2, 3, 2
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def facts_on_ranks(run_type: str, corpus: Corpus, folder: Path) -> dict[str, Any]:
    """What ``torch_on_ranks.py`` prints of a training on 2 ranks, 3 micro batches of 2 sequences each.

    63 positions cannot be split into two equal shards.
    """
    recipe = write_optimizer_recipe(
        folder / "recipe.json", clipping=0, train_batch_size=12, fp16={"initial_scale_power": 12}
    )
    flags = [*data_flags(corpus), *SHAPE, "--max_position_embeddings", "63", "--seq_length", "32", "--device", "cpu"]
    flags += ["--deepspeed_config", str(recipe), "--precision", "fp32", "--micro_batch_size_per_gpu", "2"]
    script = str(Path(__file__).with_name("torch_on_ranks.py"))
    done = run_script(script, [run_type, *flags], ranks=RANKS)
    finished(done)
    return json.loads(done.stdout.splitlines()[-1])


def assert_the_baselines_training(fact: dict[str, Any], precision: str) -> None:
    """The bounds are far below the difference between precisions, so bf16 and fp16 mean the same as in the baseline.

    In fp16 the smallest gradients have few digits, so the text decides: 2e-5 on that of Python 3.13.
    """
    assert fact["same_start"]
    assert fact["gradient"] <= (6e-5 if precision == "fp16" else 1e-5)
    for step, (one, two) in enumerate(zip(fact["expected"], fact["actual"], strict=True), start=1):
        assert two[0] == pytest.approx(one[0], abs=1e-5), f"step {step}"
        assert two[1] == pytest.approx(one[1], rel=1e-4), f"step {step}"
        assert not two[2]
    for step, own in enumerate(zip(*fact["own_losses"], strict=True)):
        assert sum(own) / len(own) == pytest.approx(fact["actual"][step][0], abs=1e-5)
        assert own[0] != pytest.approx(own[1], abs=1e-4)  # the ranks read different data
    (loss_sum, targets), (own_loss_sum, own_targets) = fact["validation"]
    assert own_targets == targets
    assert own_loss_sum == pytest.approx(loss_sum, rel=1e-5)
    assert fact["equal_weights"]
    assert fact["tied"]


def assert_one_decision_on_overflow(ranks: list[Any]) -> None:
    """Each rank skipped the same steps and has the same loss scale: 2**22, halved once per skipped step."""
    skipped, factor = ranks[0]
    assert ranks == [[skipped, factor]] * RANKS
    assert skipped[0]
    assert not skipped[-1]
    assert factor == 2.0 ** (22 - sum(skipped))


def assert_own_dropout_masks(ranks: list[Any]) -> None:
    """The ranks' losses on one batch differ, and each rank repeats its loss from the same random state."""
    (one, one_again), (two, two_again) = ranks
    assert one == one_again
    assert two == two_again
    assert one != two
