"""The verdict: every fact alone decides it, and what is unknown is never taken as equal."""

import copy

import pytest
from chart_records import flat_record, record, step_lines, without, write_run

from dsgpt.record.equal_work import (
    equal_loss_line,
    inference_stamps,
    judge,
    largest_gap,
    machine_line,
    machine_stamps,
    partial_stamps,
    setup_stamps,
    work_stamps,
)
from dsgpt.record.runs import read_run

WORK = {
    "training_config__global_batch_size": (32, "global batch 8 vs 32"),
    "training_config__seq_len": (64, "sequence length 32 vs 64"),
    "data__train_sha256": ("c" * 64, "train data aaaaaaaaaa… vs cccccccccc…"),
    "data__val_sha256": ("c" * 64, "validation data bbbbbbbbbb… vs cccccccccc…"),
    "training_config__val_windows": (4, "validation windows 16 vs 4"),
    "training_config__model__n_layer": (3, "model n_layer 2 vs 3"),
    "training_config__model__n_head": (4, "model n_head 2 vs 4"),
    "training_config__model__n_embd": (128, "model n_embd 64 vs 128"),
    "training_config__model__block_size": (64, "model block_size 32 vs 64"),
    "training_config__model__vocab_size": (512, "model vocab_size 256 vs 512"),
    "training_config__model__dropout": (0.1, "model dropout 0 vs 0.1"),
    "summary__optimizer_steps": (10, "optimizer steps 40 vs 10"),
    "summary__tokens_processed_global": (2560, "tokens 10,240 vs 2,560"),
    "training_config__precision": ("bf16", "precision fp32 vs bf16"),
}
RECIPE = {
    "training_config__optimizer": ("SGD", "optimizer type AdamW vs SGD"),
    "training_config__optimizer_params": (
        {"type": "AdamW", "lr": 0.001, "betas": [0.9, 0.999], "momentum": None, "torch_adam": True},
        "optimizer settings betas [0.9, 0.95] vs [0.9, 0.999]",
    ),
    "training_config__lr": (0.002, "learning rate 0.001 vs 0.002"),
    "training_config__scheduler": (
        {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 8}},
        "scheduler params warmup_num_steps 4 vs 8",
    ),
    "training_config__gradient_clipping": (0.5, "gradient clipping 1 vs 0.5"),
    "training_config__seed": (8, "seed 7 vs 8"),
}


@pytest.fixture
def read(tmp_path):
    """Write a record (and step lines) under a name and read it back."""

    def read_record(name, values, lines=None):
        return read_run(write_run(tmp_path / name, values, lines=lines), name=name)

    return read_record


def test_equal_records_did_the_same_work(read):
    verdict = judge([read("a", record()), read("b", record(training_config__strategy="zero1"))])
    assert verdict.line() == "same work: yes"
    assert work_stamps(verdict) == []


@pytest.mark.parametrize("path", WORK)
def test_each_fact_of_the_work_alone_makes_it_unequal(read, path):
    other, text = WORK[path]
    verdict = judge([read("a", record()), read("b", record(**{path: other}))])
    assert verdict.line() == f"same work: no ({text})"
    assert work_stamps(verdict) == [f"NOT EQUAL WORK: {text}"]


@pytest.mark.parametrize("path", RECIPE)
def test_each_fact_of_the_recipe_alone_makes_it_another_training(read, path):
    other, text = RECIPE[path]
    verdict = judge([read("a", record()), read("b", record(**{path: other}))])
    assert verdict.line() == f"same work: no ({text})"
    assert work_stamps(verdict) == [f"NOT THE SAME TRAINING: {text}"]


@pytest.mark.parametrize("missing", ["null", "absent"])
@pytest.mark.parametrize("on_both", [True, False])
@pytest.mark.parametrize("path", [*WORK, *RECIPE])
def test_each_fact_missing_alone_makes_it_unknown(read, path, on_both, missing):
    values = record(**{path: None}) if missing == "null" else without(record(), path)
    if path.startswith("summary__"):
        values["epochs"] = []  # else the steps and tokens are known from there
    later = on_both and path in {"training_config__val_windows", "training_config__optimizer_params"}
    verdict = judge([read("a", copy.deepcopy(values) if on_both else record()), read("b", values)])
    assert verdict.answer == ("yes" if later else "unknown")
    fact = (WORK | RECIPE)[path][1].split()[0]
    assert all(fact in facts[0] and len(facts) <= 2 for facts in verdict.unknown.values())
    assert set(verdict.unknown) == (set() if later else {"a", "b"} if on_both else {"b"})
    assert [stamp.split(":")[0] for stamp in work_stamps(verdict)] == ([] if later else ["WORK NOT VERIFIED"])


def test_facts_that_no_run_recorded_are_compared_only_if_every_version_records_them(read, snapshot):
    bare = without(without(record(), "training_config__val_windows"), "training_config__optimizer_params")
    assert judge([read("a", bare), read("b", bare)]).answer == "yes"
    assert judge([read("old", flat_record()), read("b", bare)]).line() == snapshot


@pytest.mark.parametrize("others", ["resumed too", "never resumed"])
def test_changes_at_resume_are_unknown_if_no_run_recorded_them(read, others):
    """One of the two may have resumed with other data, or with Zero++."""
    resumed = record(resumed_from="step-00000030")
    other = record(resumed_from="step-00000010") if others == "resumed too" else without(record(), "resumed_from")
    verdict = judge([read("a", resumed), read("b", other)])
    assert verdict.answer == "unknown"
    assert verdict.unknown["a"] == ("quantized communication", "changed at resume")


def test_seeds_that_are_equal_as_floats_differ(read, snapshot):
    runs = [read(str(seed), record(training_config__seed=seed)) for seed in (2**53, 2**53 + 1)]
    assert judge(runs).line() == snapshot


def test_a_seed_that_is_not_a_whole_number_is_unknown(read, snapshot):
    runs = [read(name, record(training_config__seed=7.5)) for name in "ab"]
    assert judge(runs).line() == snapshot


def test_a_known_difference_outweighs_the_unknown(read, snapshot):
    verdict = judge([read("a", record()), read("b", record(training_config__seq_len=64, data__val_sha256=None))])
    assert verdict.line() == snapshot


def test_steps_and_tokens_are_summed_from_epochs_where_the_summary_lacks_them(read):
    values = record(summary__optimizer_steps=None, summary__tokens_processed_global=None)
    assert judge([read("a", record()), read("b", values)]).answer == "yes"


def test_a_null_setting_against_a_number_is_unknown_not_equal(read, snapshot):
    open_ended = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": None}}
    verdict = judge([read("a", record()), read("b", record(training_config__scheduler=open_ended))])
    assert verdict.line() == snapshot


def test_the_old_generation_leaves_the_work_unknown(read, snapshot):
    verdict = judge([read("old", flat_record()), read("new", record())])
    assert verdict.line() == snapshot


def test_two_others_may_differ_though_the_baseline_recorded_nothing(read):
    runs = [
        read("old", flat_record()),
        read("b", record(training_config__global_batch_size=8)),
        read("c", record(training_config__global_batch_size=16)),
    ]
    verdict = judge(runs)
    assert verdict.answer == "no"
    assert verdict.differences[0].text(verdict.names) == "global batch unknown vs 8 (b), 16 (c)"


def test_a_model_without_any_size_is_named_once(read, snapshot):
    verdict = judge([read("a", record()), read("b", without(record(), "training_config__model"))])
    assert verdict.line() == snapshot


def test_values_that_look_alike_when_shortened_are_shown_whole(read):
    a, b = "d" * 63 + "1", "d" * 63 + "2"
    verdict = judge([read("a", record(data__train_sha256=a)), read("b", record(data__train_sha256=b))])
    assert a in verdict.line() and b in verdict.line()


def test_one_run_has_nothing_to_compare_with(read, snapshot):
    verdict = judge([read("a", record())])
    assert verdict.line() == snapshot
    assert work_stamps(verdict) == []


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_a_run_that_did_not_end_is_stamped(read, status, snapshot):
    runs = [read("a", record()), read("b", record(status=status))]
    assert partial_stamps(runs) == snapshot
    assert partial_stamps(runs[:1]) == []


def test_inference_of_other_lengths_is_stamped(read, snapshot):
    runs = [read("a", record()), read("b", record(inference__new_tokens=100)), read("old", flat_record())]
    assert inference_stamps(runs) == snapshot
    assert inference_stamps(runs[:1]) == []


def test_other_hardware_is_stamped_and_unknown_hardware_is_not(read, snapshot):
    a, b = read("a", record()), read("b", record(hardware__cpu_name="Other CPU"))
    assert machine_stamps([a, b]) == snapshot
    old = read("old", flat_record())
    assert machine_stamps([a, old]) == []
    assert machine_line([a, old]).startswith(
        "machine: Fixture CPU, 2 cores (instruction sets: not recorded) (not recorded by old)"
    )


def test_equal_names_with_other_instruction_sets_are_other_hardware(read):
    """Clouds call many CPUs by one name."""
    old, new = read("old", record()), read("new", record(hardware__instruction_sets="AVX2"))
    assert machine_stamps([old, new]) == []
    assert machine_line([new]).startswith("machine: Fixture CPU, 2 cores (instruction sets: AVX2)")
    (stamp,) = machine_stamps([new, read("amx", record(hardware__instruction_sets="AVX2, AMX"))])
    assert stamp.endswith("amx: Fixture CPU, 2 cores (instruction sets: AVX2, AMX)")


@pytest.mark.parametrize(("share", "stamps"), [(0.05, 0), (0.37, 1), (None, 0)])
def test_a_busy_machine_is_stamped(read, share, stamps):
    segment = {"first_step": 1, "last_step": 40, "cpu_share_of_others": share}
    found = [line for line in setup_stamps([read("a", record(segments=[segment]))]) if "BUSY" in line]
    assert len(found) == stamps
    assert all("other processes used 37% of the CPUs during this measurement" in line for line in found)


@pytest.mark.parametrize(
    ("shift", "precision", "answer"),
    [(0.015, "fp32", "yes"), (0.03, "fp32", "no"), (0.03, "bf16", "yes"), (0.06, "bf16", "no")],
)
def test_equal_loss_is_judged_by_a_tolerance_that_the_line_names(read, shift, precision, answer):
    values = record(training_config__precision=precision)
    a, b = read("a", values, step_lines()), read("b", values, step_lines(shift=shift))
    line = equal_loss_line(a, b)
    assert line.startswith(
        f"equal loss: {answer} (b against a: largest difference per step {shift:.2g} in training loss"
    )
    assert f"tolerance {0.02 if precision == 'fp32' else 0.05}" in line


def test_one_bad_step_is_found_and_decides(read, snapshot):
    lines = step_lines()
    spoiled = copy.deepcopy(lines)
    next(line for line in spoiled if line["step"] == 23)["loss"] += 0.5
    assert equal_loss_line(read("a", record(), lines), read("b", record(), spoiled)) == snapshot


def test_equal_loss_is_not_claimed_for_unequal_work(read, snapshot):
    a, b = read("a", record(), step_lines()), read("b", record(training_config__seq_len=64), step_lines())
    assert equal_loss_line(a, b) == snapshot


def test_equal_loss_needs_common_steps(read, snapshot):
    a, old = read("a", record(), step_lines()), read("old", flat_record())
    assert equal_loss_line(a, old) == snapshot


def test_equal_loss_of_unknown_work_is_labelled(read, snapshot):
    a, b = read("a", record(), step_lines()), read("b", record(data__val_sha256=None), step_lines())
    assert equal_loss_line(a, b) == snapshot


def test_largest_gap_looks_at_common_steps_only():
    assert largest_gap({1: 5.0, 2: 4.0, 3: 3.0}, {2: 4.25, 3: 3.0, 4: 9.0}) == (0.25, 2)
    assert largest_gap({1: 5.0}, {2: 5.0}) == (None, None)
