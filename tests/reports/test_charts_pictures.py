"""The contents of the pictures: warnings, values, notes in place of missing ones, axes from zero."""

import matplotlib as mpl
import pytest
from chart_records import flat_record, record, step_lines, write_run
from matplotlib.figure import Figure
from matplotlib.text import Text

from dsgpt.charts.bars import GPU_MEMORY, HOST_MEMORY, THROUGHPUT, TRAINING_TIME, draw_bars, in_two_lines, memory_bars
from dsgpt.charts.curves import EPOCHS, SMALLEST_SPAN, STEPS, draw_losses, ends_can_be_labelled, step_axis, time_axis
from dsgpt.charts.options import DARK, LIGHT
from dsgpt.charts.plots import charts_of_runs
from dsgpt.charts.style import look, quiet_style
from dsgpt.record.runs import read_run, window_of

LAST_DIGITS = {"a": 8.616005635, "b": 8.616005659}
STAMPED = ["training_time", "throughput", "inference_latency", "inference_throughput", "latency_vs_throughput"]
STAMPED += ["loss_vs_step", "loss_vs_time", "loss_vs_tokens", "peak_memory", "overview"]


@pytest.fixture
def read(tmp_path):
    def read_record(name, values, lines=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return read_run(write_run(folder, values, lines=lines), name=name)

    return read_record


@pytest.fixture
def words():
    """Every text of every chart that is drawn, by its name, in one string."""

    def read_words(runs):
        with quiet_style(LIGHT):
            frames = {name: chart() for name, chart in charts_of_runs(runs, folders={}).items()}
        return {
            name: "\n".join(text.get_text() for text in found.figure.findobj(Text))
            for name, found in frames.items()
            if not isinstance(found, str)
        }

    return read_words


def test_every_comparing_picture_is_stamped_with_what_differs(read, words):
    runs = [
        read("base", record(training_config__global_batch_size=32)),
        read("fast", record(training_config__global_batch_size=128, status="interrupted")),
    ]
    drawn = words(runs)
    assert sorted(drawn) == sorted(STAMPED)
    for name, text in drawn.items():
        assert "NOT EQUAL WORK: global batch 32 vs 128\nPARTIAL RUN: fast is interrupted" in text, name
        assert "Speed-up over" not in text


def test_equal_work_is_not_stamped_and_shows_the_speed_up(read, words):
    runs = [read("base", record(), step_lines()), read("fast", record(summary__train_time_sec=50.0), step_lines())]
    for name, text in words(runs).items():
        assert "NOT" not in text and "PARTIAL" not in text, name
        assert "same work: yes" in text
        assert ("Speed-up over base in training time: fast 2.00x." in text) == (name in {"training_time", "overview"})


def test_unknown_work_is_stamped(read, words):
    drawn = words([read("old", flat_record()), read("new", record())])
    assert all("WORK NOT VERIFIED: old did not record its work" in text for text in drawn.values())
    assert "old (steps not recorded)" in drawn["loss_vs_step"]
    assert "Only epoch means were recorded (points at epoch ends): old, new." in drawn["loss_vs_time"]


def test_of_records_with_nothing_in_them_only_the_overview_is_drawn(read, words):
    (drawn,) = words([read("a", {"schema_version": "2.1"}), read("b", {"summary": None})]).items()
    assert drawn[0] == "overview" and "not recorded" in drawn[1]


def test_unequal_inference_is_stamped_on_its_pictures_and_the_overview(read, words):
    drawn = words([read("a", record()), read("b", record(inference__new_tokens=100))])
    stamped = {name for name, text in drawn.items() if "NOT EQUAL INFERENCE: new tokens 16 vs 100" in text}
    assert stamped == {"inference_latency", "inference_throughput", "latency_vs_throughput", "overview"}


def test_a_long_list_of_differences_is_cut_and_refers_to_the_page(read, words):
    keys = ["seq_len", "global_batch_size", "lr", "gradient_clipping", "seed", "optimizer", "precision"]
    runs = [read("base-of-them-all", record())]
    for i in range(6):
        changes = {
            f"training_config__{key}": f"value-{i}" if key in {"optimizer", "precision"} else 50 + i for key in keys
        }
        runs.append(read(f"other-run-number-{i}", record(**changes)))
    text = words([*runs, read("cut", record(status="failed"))])["training_time"]
    assert "… and more: see comparison.md\nPARTIAL RUN: cut is failed" in text


def test_bars_start_at_zero_and_carry_their_values(read):
    runs = [read("a", record()), read("b", record(summary__train_time_sec=None, train_time_per_epoch=None))]
    axes = Figure().subplots()
    draw_bars(axes, TRAINING_TIME, runs)
    assert axes.get_xlim()[0] == 0
    assert [text.get_text() for text in axes.texts] == ["100.0", "not recorded"]
    assert [container[0].get_width() for container in axes.containers] == [100.0, 0.0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]


def test_a_run_too_short_for_timing_has_a_note_instead_of_a_bar(read):
    short = record(summary__mean_tokens_per_sec_global=None, train_throughput=None, summary__optimizer_steps=3)
    axes = Figure().subplots()
    draw_bars(axes, THROUGHPUT, [read("a", record()), read("b", short)])
    assert [text.get_text() for text in axes.texts] == ["102", "fewer than 4 steps"]


def test_inference_differences_are_described_as_noise_on_their_pictures(read, words):
    drawn = words([read("a", record()), read("b", record())])
    noted = {name for name, text in drawn.items() if "measurement noise." in " ".join(text.split())}
    assert noted == {"inference_latency", "inference_throughput", "latency_vs_throughput"}


def test_loss_labels_hold_the_losses_without_an_offset(read):
    for losses in ([4.0000001, 4.0000002], [1e-7, 2e-7]):
        lines = [{"step": step, "val_loss": loss} for step, loss in enumerate(losses, start=1)]
        figure = Figure()
        axes = figure.subplots()
        draw_losses(axes, [read("a", record(), lines)], kind="validation", axis=STEPS)
        figure.canvas.draw()
        assert axes.yaxis.get_offset_text().get_text() == ""


def test_single_points_that_coincide_stay_visible(read):
    lines = [{"step": 4, "val_loss": 4.0}]
    axes = Figure().subplots()
    draw_losses(axes, [read("a", record(), lines), read("b", record(), lines)], kind="validation", axis=STEPS)
    below, above = axes.lines
    assert below.get_markersize() > 1.5 * above.get_markersize() and below.get_zorder() < above.get_zorder()


def test_differences_of_rounding_do_not_fill_a_panel(read):
    runs = [read(name, record(), [{"step": 1, "val_loss": loss}]) for name, loss in LAST_DIGITS.items()]
    axes = Figure().subplots()
    draw_losses(axes, runs, kind="validation", axis=STEPS)
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(SMALLEST_SPAN)
    assert low < min(LAST_DIGITS.values()) < max(LAST_DIGITS.values()) < high


def test_gpu_and_host_memory_never_share_a_panel(read):
    cpu, gpu = read("cpu", record()), read("gpu", record(summary__max_cuda_mem_allocated_bytes_rank0=2**31))
    unrecorded = read("old", flat_record())
    assert memory_bars([cpu, cpu]) == [HOST_MEMORY]
    assert memory_bars([gpu, gpu]) == [GPU_MEMORY]
    assert memory_bars([cpu, gpu]) == [GPU_MEMORY, HOST_MEMORY]
    assert memory_bars([gpu, unrecorded]) == [GPU_MEMORY]
    assert memory_bars([unrecorded]) == [HOST_MEMORY]


def test_losses_against_steps_and_time_are_the_recorded_ones(read):
    run = read("a", record(), step_lines(steps=40, every=10))
    for axis, last in ((STEPS, 40), (time_axis([run]), 100.0)):
        axes = Figure().subplots()
        (end,) = draw_losses(axes, [run], kind="validation", axis=axis)
        assert (end.x, end.y) == (last, run.val_curve.points[-1].loss)
        assert "does not start at 0" in axes.get_ylabel()


def test_long_curves_show_every_step_and_a_mean_with_its_window(read, words):
    run = read("a", record(), step_lines(steps=500, every=100))
    assert window_of(len(run.train_curve.points)) == 10 and window_of(len(run.val_curve.points)) == 1
    axes = Figure().subplots()
    draw_losses(axes, [run], kind="train", axis=STEPS)
    raw, mean = axes.lines
    assert list(raw.get_ydata()) == [point.loss for point in run.train_curve.points]
    assert mean.get_ydata()[-1] == pytest.approx(sum(raw.get_ydata()[-10:]) / 10)
    assert "bold: mean of the last 10 recorded steps" in words([run])["loss_vs_step"]


def test_epochs_are_the_axis_only_if_no_run_recorded_steps(read, words):
    old, new = read("old", flat_record()), read("new", record())
    assert step_axis([old, old]) is EPOCHS
    assert step_axis([old, new]) is STEPS
    assert "Loss by epoch" in words([old])["loss_vs_step"]


@pytest.mark.parametrize(("seconds", "unit"), [(100, "(s)"), (600, "(minutes)"), (20_000, "(hours)")])
def test_the_time_axis_names_its_unit(read, seconds, unit):
    run = read("a", record(), step_lines(seconds=seconds / 40))
    axis = time_axis([run])
    assert unit in axis.label
    axes = Figure().subplots()
    (end,) = draw_losses(axes, [run], kind="train", axis=axis)
    assert end.x * axis.scale == pytest.approx(seconds)


def test_curves_are_named_at_their_ends_only_if_names_do_not_overlap(read):
    apart = [read("a", record(), step_lines()), read("b", record(), step_lines(shift=1.0))]
    close = [read("a", record(), step_lines()), read("b", record(), step_lines(shift=0.001))]
    shorter = [read("a", record(), step_lines()), read("b", record(), step_lines(steps=20, shift=1.0))]
    for runs, expected in ((apart, True), (close, False), (shorter, False)):
        axes = Figure().subplots()
        ends = draw_losses(axes, runs, kind="validation", axis=STEPS)
        assert ends_can_be_labelled(axes, ends) is expected


def test_names_of_rows_take_two_lines_before_they_are_cut():
    assert in_two_lines("zero1", 8) == "zero1"
    assert in_two_lines("zero1 on 2 ranks", 8) == "zero1 on\n2 ranks"
    assert in_two_lines("zero1 on 2 ranks, bf16", 8) == "zer…bf16"
    assert in_two_lines("a-very-long-name", 8) == "a-v…name"


def test_runs_can_be_distinguished_without_colour():
    looks = [look(index, count=8) for index in range(8)]
    assert len({each.hatch for each in looks}) == 8
    assert len({(each.marker, each.dashes) for each in looks}) == 8
    assert sorted((each.width for each in looks), reverse=True) == [each.width for each in looks]


def test_drawing_leaves_the_readers_settings_alone():
    mpl.rcParams["lines.linewidth"] = 7.5
    before = dict(mpl.rcParams)
    with quiet_style(DARK):
        assert mpl.rcParams["lines.linewidth"] != 7.5
    assert dict(mpl.rcParams) == before
    mpl.rcdefaults()


def test_many_runs_with_long_equal_beginnings_and_odd_names_are_drawn(read, words):
    names = [*(f"a-very-long-name-of-a-run-that-goes-on-and-on-{i}" for i in range(11)), "$x_1$", "100 %", "лад"]
    drawn = words([read(name, record(), step_lines(steps=4, every=2)) for name in names])
    assert "a-very-long-nam…oes-on-and-on-10" in drawn["loss_vs_step"]
    assert "$x_1$" in drawn["training_time"]
