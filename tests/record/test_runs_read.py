"""Reading a run: both generations, missing pieces, broken files, and the segments of a resumed one."""

from typing import Any

import pytest
from chart_records import flat_record, record, step_lines, without, write_run

from dsgpt.charts.comparison import comparison_markdown, console_summary
from dsgpt.common.errors import UserError
from dsgpt.record.equal_work import judge, machine_line, stamps
from dsgpt.record.runs import Run, read_run

# Reading a run: both generations, missing pieces, broken files.


def test_a_complete_record_is_read(tmp_path):
    run = read_run(write_run(tmp_path, record(), lines=step_lines()), name="a")
    assert (run.schema, run.status, run.machine) == ("2.1", "completed", "Fixture CPU, 2 cores")
    assert run.devices == "1 CPU device of 1 thread"
    assert (run.train_time, run.tokens_per_sec) == (100.0, 102.4)
    assert (run.final_train_loss, run.best_train_loss, run.final_val_loss, run.best_val_loss) == (3.5, 3.5, 3.25, 3.25)
    assert (run.inference_latency, run.inference_tokens_per_sec, run.new_tokens) == (0.5, 32.0, 16)
    assert (run.host_memory, run.gpu_memory) == (2**30, None)
    assert len(run.train_curve.points) == 40
    assert [point.step for point in run.val_curve.points] == [10, 20, 30, 40]
    assert run.val_curve.points[-1].time == 100.0
    assert run.notes == ()


def test_without_step_log_epochs_end_at_their_steps_and_times(tmp_path):
    curve = read_run(write_run(tmp_path, record()), name="a").val_curve
    assert curve.per_epoch
    assert [tuple(point) for point in curve.points] == [(4.0, 20.0, 50.0, 1, 5120.0), (3.25, 40.0, 100.0, 2, 10240.0)]


def test_the_flat_generation_is_read_without_inventing_steps(tmp_path):
    run = read_run(write_run(tmp_path, flat_record()), name="old")
    assert (run.train_time, run.tokens_per_sec, run.final_val_loss, run.inference_latency) == (100.0, 1000.0, 3.25, 2.0)
    assert run.new_tokens == 100  # what the flat key means
    assert [tuple(point[:4]) for point in run.train_curve.points] == [(4.5, None, 60.0, 1), (3.5, None, 100.0, 2)]
    assert set(run.work.values()) == {None}
    assert run.status is None and run.machine is None


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("train_throughput", [500.0, 1000.0], "tokens_per_sec", (500 * 60 + 1000 * 40) / 100),
        ("train_throughput", [500.0], "tokens_per_sec", 500.0),
        ("inference_latency", [1.0, None, 3.0], "inference_latency", 2.0),
        ("train_time_per_epoch", [60.0, None], "train_time", None),
        ("train_time_per_epoch", 60.0, "train_time", None),  # of one epoch or of both: unknown
        ("val_loss_per_epoch", 3.0, "final_val_loss", 3.0),
        ("val_loss_per_epoch", [3.0, None], "final_val_loss", None),
        ("val_loss_per_epoch", [3.0, None], "best_val_loss", 3.0),
        *(("train_loss_per_epoch", value, "final_train_loss", None) for value in (None, [], "high", True, -5)),
    ],
)
def test_a_flat_key_may_hold_a_list_a_number_or_nothing(tmp_path, key, value, field, expected):
    run = read_run(write_run(tmp_path, flat_record(**{key: value})), name="old")
    assert getattr(run, field) == expected


def test_one_number_is_the_whole_time_of_one_epoch(tmp_path):
    values = flat_record(train_time_per_epoch=60.0, train_loss_per_epoch=4.0, val_loss_per_epoch=4.0)
    run = read_run(write_run(tmp_path, values), name="old")
    assert run.train_time == 60.0
    assert [tuple(point[:4]) for point in run.train_curve.points] == [(4.0, None, 60.0, 1)]


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
def test_what_is_not_finite_becomes_unknown_and_is_noted(tmp_path, token):
    path = write_run(tmp_path, record())
    path.write_text(path.read_text().replace('"final_val_loss": 3.25', f'"final_val_loss": {token}'))
    run = read_run(path, name="a")
    assert run.final_val_loss == 3.25  # the last epoch's, from epochs[]
    assert "not finite" in run.notes[0]


@pytest.mark.parametrize("section", ["hardware", "data", "training_config", "epochs", "summary", "inference"])
@pytest.mark.parametrize("instead", [None, [], "text", 3])
def test_any_section_may_be_missing_or_of_the_wrong_type(tmp_path, section, instead):
    values = record(**{section: instead}) if instead is not None else without(record(), section)
    assert read_run(write_run(tmp_path, values), name="a").name == "a"


def test_changes_of_the_validation_set_are_noted(tmp_path, snapshot):
    """Until the new set is measured, the losses of the old set are not taken for it."""
    names = ("optimizer", "validation data", "validation windows")
    changes = [{"step": 20, "name": name, "before": "zero2 on 4 ranks", "after": "ddp on 2 ranks"} for name in names]
    values = record(changed_at_resume=changes, summary__final_val_loss=None, summary__best_val_loss=None)
    run = read_run(write_run(tmp_path, values), name="a")
    assert (run.final_val_loss, run.best_val_loss, run.notes) == (None, None, snapshot)


def test_broken_lines_are_skipped_and_noted_and_of_a_step_the_last_line_counts(tmp_path):
    path = write_run(tmp_path, record())
    lines = ['{"step": 1, "loss": 5.0}', '{"step": 2, "lo', '{"step": 3, "loss": NaN}', '{"step": 4, "loss": 4.0}']
    path.with_name("metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "loss": 3.0}', '{"step": 5, "lo']))
    run = read_run(path, name="a")  # a run may be writing the last line: it is no mistake
    assert run.train_curve.at_steps() == {1: 5.0, 4: 3.0}
    assert len(run.notes) == 1 and "line 2 is broken" in run.notes[0] and "1 more" in run.notes[0]


def test_an_empty_step_log_falls_back_to_epochs(tmp_path):
    run = read_run(write_run(tmp_path, record(), lines=[]), name="a")
    assert run.train_curve.per_epoch and len(run.train_curve.points) == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b'{"summary": ', "not JSON"),
        (b"[1, 2]", "a JSON list, not an object"),
        (b'{"weights": 1}', "none of a training record's keys"),
        (b"[" * 100_000, "not JSON"),
        (b"\x80\x81\xff" * 9, "not a text file"),
    ],
)
def test_a_file_that_is_not_a_record_is_an_error_of_one_line(tmp_path, data, reason):
    path = tmp_path / "training_metrics.json"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_run(path, name="a")
    (problem,) = caught.value.problems
    assert str(path) in problem and reason in problem and "\n" not in problem


def test_the_visible_gpus_do_not_make_another_machine(tmp_path):
    gpus = {"hardware__device": "cuda", "hardware__gpu_name": "NVIDIA T4", "hardware__world_size": 4}
    for visible in (0, 4):
        run = read_run(write_run(tmp_path, record(**gpus, hardware__gpu_count_visible=visible)), name="a")
        assert (run.machine, run.devices) == ("NVIDIA T4; Fixture CPU, 2 cores", "4 GPUs")


# Runs of several processes: which differences between them are shown, and where.


OTHER_CPU = {"cpu_name": "Other CPU"}


def segment(first_step: int, last_step: int, **changes: Any) -> dict[str, Any]:
    """A segment on the fixture's machine; ``hardware`` and ``env`` among ``changes`` are laid over its own."""
    hardware = record()["hardware"] | changes.pop("hardware", {})
    env = {"python_version": "3.11.7", "torch_version": "2.13.0"} | changes.pop("env", {})
    return {
        "first_step": first_step, "last_step": last_step, "host": "fixture-host", "hardware": hardware, "env": env,
        "strategy": "zero1", "micro_batch_size_per_gpu": 8, "grad_accum_steps": 1, "compile": False,
        "pad_logits": False, "cuda_graphs": False, "activation_checkpointing": False,
        "quantized_weights": False, "quantized_gradients": False,
        "git_commit": "c" * 40, "train_time_sec": 40.0, "mean_tokens_per_sec_global": 128.0,
        "max_cuda_mem_allocated_bytes_rank0": None, "peak_rss_bytes_rank0": 2**30,
    } | changes  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """A run of 40 steps, the first 30 of them as the program's defaults and the others with ``changes``."""

    def read_segments(name: str = "b", *, first: dict[str, Any] | None = None, **changes: Any) -> Run:
        segments = [first or segment(1, 30), segment(31, 40, **changes)]
        values = record(segments=segments, resumed_from="step-00000030", changed_at_resume=[])
        return read_run(write_run(tmp_path / name, values, lines=step_lines()), name=name)

    return read_segments


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hardware": {"threads_per_device": 2}},
        {"hardware": {"world_size": 2}},
        {"hardware": OTHER_CPU},
        {"strategy": "zero2"},
        {"compile": True},
        {"pad_logits": True},
        {"cuda_graphs": True},
        {"activation_checkpointing": True},
        {"micro_batch_size_per_gpu": 4},
        {"env": {"torch_version": "2.14.0"}},
        {"host": "next", "hardware": {"launcher": "torchrun"}, "git_commit": "d" * 40},
    ],
    ids=str,
)
def test_a_setup_that_changed_is_stamped_or_noted(read, snapshot, changes):
    """Also if the last segment alone is as the other run's."""
    run, back = read(**changes), read("c", first=segment(1, 30, **changes))
    said = [*stamps([run]), *run.notes, *stamps([read("a"), back]), machine_line([back])]
    assert "\n".join(said) == snapshot


def test_segments_without_a_step_are_ignored(tmp_path):
    values = record(segments=[segment(1, 40), segment(41, 40, strategy="ddp", hardware=OTHER_CPU)])
    run = read_run(write_run(tmp_path, values), name="a")
    assert (stamps([run]), run.strategy) == ([], "zero1")


def test_steps_without_a_record_are_stamped(tmp_path):
    run = read_run(write_run(tmp_path, record(segments=[segment(31, 40)])), name="gap")
    assert stamps([run]) == ["NOT RECORDED: how gap executed its steps 1 to 30"]
    assert run.machine == "not recorded to step 30, Fixture CPU, 2 cores from step 31"


def test_zero_plus_plus_for_some_of_the_steps_is_another_training(read, snapshot):
    assert judge([read("a"), read("b", first=segment(1, 30, quantized_weights=True))]).line() == snapshot


def test_every_segment_is_a_row_of_the_page(read):
    run = read(strategy="zero2", train_time_sec=60.0, peak_rss_bytes_rank0=2**29)
    stamp, text = "SEGMENTS DIFFER: b: strategy zero1 to step 30, zero2 from step 31", comparison_markdown([run])
    assert stamp in console_summary([run]) and f"**{stamp}**" in text
    assert "| b | 1 to 30 | zero1 | 1 CPU device of 1 thread | Fixture CPU, 2 cores | 40.0 | 128 | 1.07 |" in text
    assert "| b | 31 to 40 | zero2 | 1 CPU device of 1 thread | Fixture CPU, 2 cores | 60.0 | 128 | 0.54 |" in text


@pytest.mark.parametrize(
    "segments", [None, [], "text", [3], [{}], [{"first_step": "1", "last_step": []}], [{"hardware": 3}]]
)
def test_invalid_segments_are_ignored(tmp_path, segments):
    assert read_run(write_run(tmp_path, record(segments=segments)), name="a").machine == "Fixture CPU, 2 cores"
