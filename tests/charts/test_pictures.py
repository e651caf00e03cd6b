"""The pictures: of runs and of sweeps."""

import itertools
import json
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from chart_records import (
    FOOTPRINT,
    MB,
    STATE,
    cell,
    compared,
    flat_record,
    record,
    scaling,
    spread,
    step_lines,
    sweep,
    write_run,
    write_sweep,
)
from matplotlib.figure import Figure
from matplotlib.text import Text

from dsgpt.charts import runs as drawing
from dsgpt.charts.memory import communication_chart, memory_chart, read_samples, step_times_chart, utilisation_chart
from dsgpt.charts.style import Frame, Texts, look, quiet_style
from dsgpt.charts.sweeps import charts_of_sweep, efficiency_rows, scaling_chart
from dsgpt.charts.themes import DARK, LIGHT, THEMES, contrast
from dsgpt.common.errors import UserError
from dsgpt.record.runs import Footprint, read_run, window_of
from dsgpt.record.suites import Comparison, Measured, State, of_cells, of_runs, read_predictions, read_sweep

# The contents of the pictures: warnings, values, notes in place of missing ones, axes from zero.


@pytest.fixture
def read(tmp_path):
    def read_record(name, values, lines=None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return read_run(write_run(folder, values, lines=lines), name=name)

    return read_record


def words(runs, chart: str) -> str:
    """Every text of a chart."""
    return texts(drawing.charts_of_runs(runs, folders={})[chart]())


NUMBERS, NAMES = ("seq_len", "global_batch_size", "lr", "gradient_clipping", "seed"), ("optimizer", "precision")
MANY = [
    {f"training_config__{key}": 50 + run for key in NUMBERS}
    | {f"training_config__{key}": f"value-{run}" for key in NAMES}
    for run in range(7)
]
COMPARED = {
    "other work": [
        record(training_config__global_batch_size=32),
        record(training_config__global_batch_size=128, status="interrupted"),
    ],
    "equal work": [record(), record(summary__train_time_sec=50.0)],
    "unknown work": [flat_record(), record()],
    "nothing recorded": [{"schema_version": "2.1"}, {"summary": None}],
    "other inference": [record(), record(inference__new_tokens=100)],
    "many differences": [*(record(**changes) for changes in MANY), record(status="failed")],
}


@pytest.mark.parametrize("case", COMPARED)
def test_what_pictures_of_runs_say_around_their_panels(read, case, snapshot):
    """Each line above or below panels, and the charts that have it: every chart is stamped with what differs."""
    runs = [read("abcdefgh"[place], values) for place, values in enumerate(COMPARED[case])]
    frames = {name: chart() for name, chart in drawing.charts_of_runs(runs, folders={}).items()}
    drawn = {name: frame.figure.subfigs for name, frame in frames.items() if isinstance(frame, Frame)}
    said: dict[str, list[str]] = {}
    for name, (head, _, foot) in drawn.items():
        for line in [line for part in (head, foot) for text in part.texts for line in text.get_text().splitlines()]:
            said.setdefault(line, []).append(name)
    lines = {line: "all" if names == [*drawn] else ", ".join(names) for line, names in said.items() if line}
    parts = [f"drawn: {', '.join(drawn)}", *(f"{line}\n    {names}" for line, names in lines.items())]
    assert "\n".join(parts) == snapshot


def test_what_a_run_did_not_record_is_noted_in_its_pictures(read):
    old, new = read("old", flat_record()), read("new", record())
    assert "old (steps not recorded)" in words([old, new], "loss_vs_step")
    assert "Loss by epoch" in words([old], "loss_vs_step")
    assert "not recorded" in words([read("a", {"schema_version": "2.1"})], "overview")


def test_bars_start_at_zero_and_carry_their_values_or_a_note(read):
    axes = Figure().subplots()
    lacking = {"summary__mean_tokens_per_sec_global": None, "train_throughput": None, "summary__optimizer_steps": 3}
    drawing.draw_bars(axes, drawing.THROUGHPUT, [read("a", record()), read("b", record(**lacking))])
    assert axes.get_xlim()[0] == 0 and widths(axes) == [102.4, 0.0]
    assert [text.get_text() for text in axes.texts] == ["102", "fewer than 4 steps"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]


@pytest.fixture
def validated(read):
    """The panel of the validation losses of runs, by name; drawn, so that its labels are there."""

    def panel(**losses: list[float]):
        runs = [
            read(name, record(), [{"step": step, "val_loss": loss} for step, loss in enumerate(values, start=1)])
            for name, values in losses.items()
        ]
        axes = Figure().subplots()
        drawing.draw_losses(axes, runs, kind="validation", axis=drawing.STEPS)
        axes.figure.canvas.draw()
        return axes

    return panel


def test_single_points_that_coincide_stay_visible_and_rounding_does_not_fill_a_panel(validated):
    below, above = validated(a=[4.0], b=[4.0]).lines
    assert below.get_markersize() > 1.5 * above.get_markersize() and below.get_zorder() < above.get_zorder()
    assert validated(a=[4.0000001, 4.0000002]).yaxis.get_offset_text().get_text() == ""
    low, high = validated(a=[8.616005635], b=[8.616005659]).get_ylim()
    assert high - low == pytest.approx(drawing.SMALLEST_SPAN)
    assert low < 8.616005635 and high > 8.616005659


def test_gpu_and_host_memory_never_share_a_panel(read):
    cpu, gpu = read("cpu", record()), read("gpu", record(summary__max_cuda_mem_allocated_bytes_rank0=2**31))
    unrecorded = read("old", flat_record())
    assert drawing.memory_bars([cpu, cpu]) == [drawing.HOST_MEMORY]
    assert drawing.memory_bars([gpu, gpu]) == [drawing.GPU_MEMORY]
    assert drawing.memory_bars([cpu, gpu]) == [drawing.GPU_MEMORY, drawing.HOST_MEMORY]
    assert drawing.memory_bars([gpu, unrecorded]) == [drawing.GPU_MEMORY]
    assert drawing.memory_bars([unrecorded]) == [drawing.HOST_MEMORY]


def test_long_curves_show_every_step_and_a_mean_with_its_window(read):
    run = read("a", record(), step_lines(steps=500, every=100))
    assert window_of(len(run.train_curve.points)) == 10 and window_of(len(run.val_curve.points)) == 1
    axes = Figure().subplots()
    drawing.draw_losses(axes, [run], kind="train", axis=drawing.STEPS)
    raw, mean = axes.lines
    assert list(raw.get_ydata()) == [point.loss for point in run.train_curve.points]
    assert mean.get_ydata()[-1] == pytest.approx(sum(raw.get_ydata()[-10:]) / 10)
    assert "bold: mean of the last 10 recorded steps" in words([run], "loss_vs_step")


@pytest.mark.parametrize(("seconds", "unit"), [(100, "(s)"), (600, "(minutes)"), (20_000, "(hours)")])
def test_losses_against_steps_and_time_are_the_recorded_ones(read, seconds, unit):
    run = read("a", record(), step_lines(seconds=seconds / 40, every=10))
    assert unit in drawing.time_axis([run]).label
    for axis, last in ((drawing.STEPS, 40), (drawing.time_axis([run]), seconds)):
        axes = Figure().subplots()
        (end,) = drawing.draw_losses(axes, [run], kind="validation", axis=axis)
        assert (end[1] / axis.scale(run), end[2]) == (pytest.approx(last), run.val_curve.points[-1].loss)
        assert "does not start at 0" in axes.get_ylabel()


def test_curves_are_named_at_their_ends_only_if_names_do_not_overlap(read):
    apart = [read("a", record(), step_lines()), read("b", record(), step_lines(shift=1.0))]
    close = [read("a", record(), step_lines()), read("b", record(), step_lines(shift=0.001))]
    shorter = [read("a", record(), step_lines()), read("b", record(), step_lines(steps=20, shift=1.0))]
    for runs, expected in ((apart, True), (close, False), (shorter, False)):
        axes = Figure().subplots()
        ends = drawing.draw_losses(axes, runs, kind="validation", axis=drawing.STEPS)
        assert drawing.ends_can_be_labelled(axes, ends) is expected


def test_runs_can_be_distinguished_without_colour():
    looks = [look(index, count=8) for index in range(8)]
    assert len({each.hatch for each in looks}) == 8
    assert len({(each.marker, each.dashes) for each in looks}) == 8
    assert sorted((each.width for each in looks), reverse=True) == [each.width for each in looks]


def test_many_runs_with_long_equal_beginnings_and_odd_names_are_drawn(read):
    names = [*(f"a-very-long-name-of-a-run-that-goes-on-and-on-{i}" for i in range(11)), "$x_1$", "100 %", "лад"]
    runs = [read(name, record(), step_lines(steps=4, every=2)) for name in names]
    assert "a-very-long-nam…oes-on-and-on-10" in words(runs, "loss_vs_step")
    assert "$x_1$" in words(runs, "overview")


# The charts of sweeps and of what a step costs: the data in their axes, and what is said where there are none.


SPEEDS = {"ddp": {1: 0.98, 2: 1.8}, "zero1": {2: 1.7}}


@pytest.fixture(autouse=True)
def in_style():
    with quiet_style(LIGHT):
        yield


def panels(picture: Frame | str) -> list:
    assert isinstance(picture, Frame), picture
    return picture.figure.axes


def widths(axes) -> list[float]:
    return [round(patch.get_width(), 6) for container in axes.containers for patch in container]


def texts(picture: Frame | str) -> str:
    assert isinstance(picture, Frame), picture
    return "\n".join(text.get_text() for text in picture.figure.findobj(Text))


def test_speed_ups_stand_beside_the_ideal_and_begin_at_the_baseline():
    (axes,) = panels(scaling_chart(scaling(SPEEDS), Texts()))
    ideal, baseline, ddp, zero1 = axes.lines
    assert (list(ideal.get_xdata()), list(ideal.get_ydata())) == ([1, 2], [1, 2])
    assert (list(baseline.get_xdata()), list(baseline.get_ydata())) == ([1], [1])
    assert list(ddp.get_ydata()) == [0.98, 1.8]
    assert list(zero1.get_ydata()) == [1.0, 1.7] and zero1.get_xdata()[0] == 1
    assert [round(x) for x in ddp.get_xdata()] == [1, 2]
    ranges = [np.asarray(line.get_segments()[0])[:, 1].tolist() for line in axes.collections]
    assert [0.9 * 1.8, 1.1 * 1.8] in [pytest.approx(ends) for ends in ranges]


def test_strong_and_weak_scaling_have_panels_of_their_own():
    strong, weak = scaling(SPEEDS), scaling({"ddp": {2: 1.9}}, weak=True)
    both = replace(strong, cells=[*strong.cells, *weak.cells[1:]], comparisons=[*strong.comparisons, *weak.comparisons])
    picture = scaling_chart(both, Texts())
    assert [axes.get_title() for axes in panels(picture)] == ["Strong scaling", "Weak scaling"]
    assert "is not the same training" in texts(picture)
    assert list(panels(picture)[1].lines[2].get_ydata()) == [1.0, 1.9]
    assert "is not the same training" not in texts(scaling_chart(strong, Texts()))


def test_efficiency_is_the_speed_up_per_device():
    found = scaling(SPEEDS)
    rows = {row.name: row for row in efficiency_rows(found, found.comparisons[0])}
    two = rows["ddp on 2 devices"]
    assert two.label == "90% (1.80x)" and [two.value, two.low, two.high] == pytest.approx([90, 81, 99])
    assert rows["ddp on 1 device"].group == two.group != rows["zero1 on 2 devices"].group


def test_other_work_and_failures_are_marked_and_have_no_bar():
    cells = [cell("baseline on 1 device", 1), cell("ddp on 2 devices", 2), cell("big", 2, state=State.OUT_OF_MEMORY)]
    other_work = "same work: no (global batch 8 vs 16)"
    others = [compared("ddp on 2 devices", None, 2, same_work=other_work), compared("big", None, 2)]
    others.append(compared("fsdp on 2 devices", 1.5, 2))
    comparison = Comparison(name="strategies", kind="same training", baseline=cells[0].name, cells=others)
    found = sweep([*cells, cell("fsdp on 2 devices", 2)], [comparison])
    charts = {name: chart() for name, chart in charts_of_sweep(found, name="mine").items()}
    for name in ("mine_throughput", "mine_efficiency", "mine_memory", "mine_step_times"):
        text = texts(charts[name])
        assert "NOT COMPARED: ddp on 2 devices: same work: no (global batch 8 vs 16)" in text, name
        assert "NOT ALL TURNS: big: 0 of 1 turns are done" in text and "out of memory" in text
        assert "sweep mine: suite scaling, 4 cells, 3 repeats, 2026-03-04; machine: Fixture CPU, 2 cores (" in text
        assert text.endswith("(instruction sets: not recorded).")
    (efficiency,) = panels(charts["mine_efficiency"])
    assert widths(efficiency) == [0.0, 0.0, 75.0]
    assert "not comparable" in texts(charts["mine_efficiency"])


def test_the_cost_of_more_tokens_is_marked():
    found = scaling({"ddp": {2: 1.8}}, weak=True)
    cells = [
        replace(one, cost=spread(2.0), turns=[replace(one.turns[0], work={"tokens": tokens})])
        for one, tokens in zip(found.cells, (1000.0, 2000.0), strict=True)
    ]
    for of_sweep, marked in ((cells, True), ([replace(one, turns=cells[0].turns) for one in cells], False)):
        charts = charts_of_sweep(replace(found, cells=of_sweep, price_per_device_hour=3.0), name="mine")
        assert ("NOT EQUAL WORK" in texts(charts["mine_money"]())) == marked


def test_memory_is_stacked_and_predicted_beside_measured():
    footprint = replace(FOOTPRINT, model_state={**STATE, "master weights": 0.0})  # no such part is in the legend
    found = sweep([cell("a", 1, footprint=footprint), cell("b", 2, footprint=footprint)], [])
    picture = memory_chart(of_cells(found), Texts())
    stacks, resident = panels(picture)
    predicted, measured = [8, 8, 16, 10, 2], [8, 8, 16]
    assert widths(stacks) == [*predicted, *measured] * 2
    assert [patch.get_x() for container in stacks.containers[:5] for patch in container] == [0, 8, 16, 32, 42]
    assert [text.get_text() for text in stacks.texts] == ["44.0 predicted", "32.0 of model state measured"] * 2
    (legend,) = picture.body.legends
    assert [text.get_text() for text in legend.get_texts()] == [*footprint.predicted, "predicted", "measured"]
    above, below = ({bar.get_facecolor() for bar in panel.patches} for panel in (stacks, resident))
    assert not above & below  # a colour means one thing
    assert widths(resident) == [400, 400] and "resident (RSS)" in resident.get_xlabel()


def test_on_a_gpu_the_measured_peak_beyond_the_state_is_one_part():
    found = replace(FOOTPRINT, peak=40.0 * MB, peak_kind="allocated", predicted=None)
    (axes,) = panels(memory_chart([Measured("a", found)], Texts()))
    assert widths(axes) == [8, 8, 16, 8]
    offloaded = replace(found, state_rank0=None)  # the state is partly in host memory
    (axes,) = panels(memory_chart([Measured("a", offloaded)], Texts()))
    assert widths(axes) == [8, 8, 16]


def test_a_record_of_the_planner_has_predicted_beside_measured_peaks(tmp_path):
    """Of the rank that needed most."""
    parts = {"weights": 4 * MB, "buckets": 2 * MB, "logits": MB}
    ranks = [{"measured": 5 * MB, "predicted": {"parts": {}}}, {"measured": 8 * MB, "predicted": {"parts": parts}}]
    cells = [{"title": "zero1", "peak_memory": ranks}, {"title": "fsdp", "status": "failed"}]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"timestamp_utc": "2026-03-04T05:06", "hardware": {"cpu_name": "X"}, "cells": cells}))
    predictions = read_predictions(path)
    chart = memory_chart(predictions.rows, Texts(footer=predictions.footer))
    (axes,) = panels(chart)
    assert widths(axes) == [4, 1, 2, 8]
    assert [text.get_text() for text in axes.texts] == ["7.0 predicted", "8.0 measured", "failed"]
    assert "benchmark.py plan: 2 cells, 2026-03-04; machine: X (instruction sets: not recorded)." in texts(chart)
    path.write_text('{"schema_version": "2.1", "cells": [{}]}')
    with pytest.raises(UserError, match="holds no predictions beside measurements"):
        read_predictions(path)


def test_communication_has_a_panel_for_what_is_known():
    sent, share = panels(communication_chart(of_cells(sweep([cell("a", 1)], [])), Texts()))
    assert (widths(sent), widths(share)) == ([8.0], [25.0])
    unknown = [Measured("a", FOOTPRINT, sent_bytes_per_step=8e6), Measured("b", Footprint())]
    (only,) = panels(communication_chart(unknown, Texts()))
    assert [text.get_text() for text in only.texts] == ["8.0", "not recorded"]


def test_step_times_are_drawn_by_their_quantiles():
    (axes,) = panels(step_times_chart([Measured("a", FOOTPRINT)], Texts()))
    box = axes.patches[0].get_path().vertices[:, 0]
    assert (min(box), max(box)) == (pytest.approx(105), pytest.approx(115))
    assert axes.texts[0].get_text() == "median 110.0"
    assert axes.texts[0].xy == (pytest.approx(110), 0)
    assert "does not start at 0" in axes.get_xlabel()


def test_a_record_says_what_its_run_cost(tmp_path):
    """The keys of ``cost`` and ``summary``; of the steps, those that are not marked as warm-up."""
    names = ("weights", "new_gradients", "gradients", "logits", "activations", "buckets", "other")
    parts = dict(zip(names, (1, 2, 3, 5, 7, 11, 13), strict=True))
    values = record(
        cost={
            "model_state_bytes_per_rank": {"parameters": 100, "gradients": 50, "optimizer": 200,
                                           "total_by_rank": [300, 350], "by_device": {"cuda": 350}},
            "communication_per_step": {"ring_bytes_per_rank": 77},
        },
        summary__predicted_peak_memory={"rank0": {"parts": parts}},
        summary__communication_share=0.125,
        summary__max_cuda_mem_allocated_bytes_rank0=1000,
    )  # fmt: skip
    lines = [{"step": step, "warm_up": step < 3, "step_time_sec": float(step)} for step in range(1, 6)]
    run = read_run(write_run(tmp_path, values, lines=lines), name="a")
    (row,) = of_runs([run])
    assert (row.sent_bytes_per_step, row.communication_share) == (77, 0.125)
    found = row.footprint
    assert found.model_state == {"weights": 100, "gradients": 50, "optimizer": 200}
    buckets = {"buckets and gathered layers": 11}
    assert found.predicted == {"weights": 1, "gradients": 5, "activations": 12, "other": 13, **buckets}
    assert found.rest == 700
    assert found.step_times_sec == [3, 4, 5]


def test_losses_by_tokens_and_by_money(tmp_path):
    run = read_run(write_run(tmp_path, record(hardware__world_size=4), lines=step_lines()), name="a")
    axis, axes = drawing.token_axis([run]), Figure().subplots()
    (end,) = drawing.draw_losses(axes, [run], kind="validation", axis=axis)
    assert (axis.label, end[1]) == ("thousands of tokens", pytest.approx(256 * 40 / 1000))
    runs = [run, replace(run, device_count=None)]
    (end,) = drawing.draw_losses(axes, runs, kind="train", axis=drawing.money_axis(9.0))
    assert end[1] == pytest.approx(100 * 4 * 9 / 3600)


def gpu(uuid: str, utilisation: float, watts: float | None) -> dict:
    return {"uuid": uuid, "utilisation": utilisation, "power_watts": watts}


def test_gpus_over_time_are_joined_over_machines_and_pauses(tmp_path):
    lines = [{"time": 1000.2 + second, "gpus": [gpu("a", 0.5, 100), gpu("b", 1.0, 200)]} for second in (0, 1, 900)]
    (tmp_path / "hardware.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (tmp_path / "hardware-1.jsonl").write_text(json.dumps({"time": 1001.9, "gpus": [gpu("c", 0.0, 300)]}) + "\n")
    samples = read_samples(tmp_path)
    assert [(time, sorted(used)) for time, used, _ in samples] == [
        (0, [0.5, 1.0]),
        (1, [0.0, 0.5, 1.0]),
        (2, [0.5, 1.0]),
    ]
    use, power = panels(utilisation_chart({"run": tmp_path}, Texts()))
    assert list(use.lines[0].get_ydata()) == [75, 50, 75]
    assert list(power.lines[0].get_ydata()) == [300, 600, 300]


def test_charts_without_data_say_what_is_missing(tmp_path):
    run = read_run(write_run(tmp_path / "run", {"schema_version": "2.1"}), name="a")
    charts = drawing.charts_of_runs([run], folders={"a": tmp_path / "run"}) | charts_of_sweep(sweep([], []), name="s")
    found = {name: chart() for name, chart in charts.items()}
    assert [name for name, picture in found.items() if isinstance(picture, Frame)] == ["overview"]
    assert found["loss_vs_tokens"] == "no run recorded losses with their tokens"
    assert found["utilisation"] == "no run folder has samples of GPUs (hardware.jsonl)"


def test_no_text_covers_another():
    """With names as long as those of the built-in suites, and every figure that a cell can have."""
    names = ["zero3-offload", "pipeline", "sequence", "ddp", "fsdp", "tensor", "zero2-offload"]
    by_devices = {devices: 0.7 * devices for devices in (1, 2)}
    found = scaling(dict.fromkeys(names, by_devices))
    cells = [replace(each, cost=spread(0.001)) for each in found.cells]
    found = replace(found, cells=cells, price_per_device_hour=1.0)
    for name, chart in charts_of_sweep(found, name="s").items():
        picture = chart()
        assert isinstance(picture, Frame), name
        picture.figure.draw_without_rendering()
        shown = [text for text in picture.figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
        covered = [(a, b) for (a, one), (b, two) in itertools.combinations(boxes, 2) if overlap(one, two) and a != b]
        assert not covered, name


def overlap(one, two) -> bool:
    """Whether two boxes share more than a pixel in both directions."""
    wide, tall = (min(one.x1, two.x1) - max(one.x0, two.x0), min(one.y1, two.y1) - max(one.y0, two.y0))
    return wide > 1 and tall > 1


CONTRADICTIONS = {
    "a baseline that is no cell": lambda found: replace(
        found, comparisons=[replace(found.comparisons[0], baseline="ddp on 8 devices")]
    ),
    "a compared cell that is none": lambda found: replace(found, cells=found.cells[:1]),
    "a name twice": lambda found: replace(found, cells=[*found.cells, found.cells[0]]),
    "a name that clears the screen": lambda found: replace(found, suite="mine\x1b[2J"),
    "no device": lambda found: replace(found, cells=[replace(found.cells[0], devices=0), *found.cells[1:]]),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_record_that_contradicts_itself_is_refused_in_a_line(what, tmp_path):
    path = write_sweep(tmp_path, CONTRADICTIONS[what](scaling(SPEEDS)))
    with pytest.raises(UserError, match=r"cannot be read as the record of a sweep: [^\n]+$") as refused:
        read_sweep(path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_texts_and_colours_stand_out_and_drawing_leaves_the_readers_settings_alone(theme):
    """WCAG 2.2: 4.5 for text, 3 for what is drawn. Light orange and pink bars have hatches and figures besides."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast(theme.ink, theme.background) > 12 and contrast(theme.quiet, theme.background) > 4.5
    assert min(contrast(colour, theme.background) for colour in theme.palette) > (3 if theme is DARK else 2.2)
    with mpl.rc_context({"lines.linewidth": 7.5}):
        before = dict(mpl.rcParams)
        with quiet_style(theme):
            assert mpl.rcParams["lines.linewidth"] != 7.5
        assert dict(mpl.rcParams) == before
