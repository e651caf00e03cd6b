"""The pages of runs, as Streamlit shows them, and what they read while runs write."""

import json
import math
import os
import re
import tomllib

import numpy as np
import pytest
from chart_records import record, step_lines, write_run
from pandas import DataFrame
from small_run import REPOSITORY, write_documents
from streamlit.testing.v1 import AppTest

from dsgpt.charts.themes import DARK, LIGHT
from dsgpt.common.errors import UserError
from dsgpt.common.files import Lock
from dsgpt.dashboard.reading import StepReader, _parsed, contents, inside, model_name, own_file
from dsgpt.dashboard.ui import as_csv, thinned
from dsgpt.data.data_set import open_data
from dsgpt.model.config import PRESETS
from dsgpt.record.runs import read_step_curves, smoothed
from dsgpt.record.schema import Fields
from dsgpt.training.status import SILENT_SEC, Signs, Status, status_of

SETTINGS = tomllib.loads((REPOSITORY / "charts" / ".streamlit" / "config.toml").read_text())
EVIL = "*x* [y](http:z) $a$ :red[b] <img src=q> :smile:"


def column(test: AppTest, name: str, *, table: int = 0) -> list:
    return test.dataframe[table].value[name].tolist()


def table(test: AppTest, heading: str) -> DataFrame:
    """The table with a column of that heading."""
    return next(each.value for each in test.dataframe if heading in each.value)


def texts(test: AppTest) -> str:
    """Everything that a page says outside of tables and pictures."""
    kinds = (test.markdown, test.caption, test.warning, test.info, test.success, test.error, test.metric)
    return "\n".join(element.value for kind in kinds for element in kind)


def metrics(test: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in test.metric}


def test_the_overview_answers_first_and_tells_states_apart(runs, open_page):
    """Beside the pair: a faster run of less work, a run in each of the other states, and three that are damaged."""
    write_run(runs / "less", record(training_config__global_batch_size=4, summary__train_time_sec=1.0))
    for name, changes in {
        "killed": {"status": "running"},  # on another machine, and its files are new
        "stopped": {"status": "interrupted"},
        "broken": {"status": "failed"},
        "alive": {"status": "running", "host": None, "training_config__total_steps": 400, "goodput": {"share": 0.75}},
    }.items():
        write_run(runs / name, record(**changes), lines=step_lines(steps=7))
    for name, text in {"half": '{"schema_version": "2.1", "sta', "foreign": '{"accuracy": 1}'}.items():
        (runs / name).mkdir()
        (runs / name / "training_metrics.json").write_text(text)
    (runs / "started").mkdir()
    (runs / "started" / ".lock").touch()
    with Lock.of_file(runs / "alive" / ".lock") as lock:
        lock.take()
        test = open_page("overview")
    found = dict(zip(column(test, "run"), [state.split()[1] for state in column(test, "state")], strict=True))
    assert found == (
        dict.fromkeys(("alive", "killed"), "running")
        | dict.fromkeys(("baseline", "zero1", "less"), "finished")
        | dict.fromkeys(("half", "foreign"), "unknown")
        | {"stopped": "interrupted", "broken": "failed", "started": "abandoned"}
    )
    assert column(test, "run")[0] == "alive" and column(test, "progress")[0] == pytest.approx(7 / 400)
    assert column(test, "goodput")[0] == 0.75
    figures = {"Runs": "10", "Running now": "2", "Fastest of equal work": "zero1"}
    figures["Cheapest of equal work"] = "baseline"  # two devices for 60% of the time
    assert metrics(test) == figures
    for said in ("60 s instead of 1 min 40 s: **1.67x**", "not JSON", "none of a training", "**started** is abandoned"):
        assert said in texts(test)


def test_the_overview_searches_and_prices(open_page):
    test = open_page("overview")
    test.text_input("search").input("ZERO").run()
    assert column(test, "run") == ["zero1"]
    test.number_input("price").set_value(36.0).run()
    assert "$1\\.00" in texts(test).replace("\\$", "$")
    test.text_input("search").input("nothing like it").run()
    assert [info.value for info in test.info] == ["No run matches."]


def test_an_empty_folder_says_how_to_make_the_first_run(tmp_path, open_page):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "make demo" in open_page("overview", folder=empty).code[0].value
    assert "make demo" in open_page("generate", folder=empty).info[0].value
    assert open_page("live", folder=empty).info and open_page("compare", folder=empty).info
    assert open_page("spikes", folder=empty).info


def test_equal_work_is_compared_and_its_losses_are(runs, open_page):
    write_run(runs.parent / "secret", record())
    test = open_page("compare", query={"runs": ["../secret"]})  # an address leads to no other folder
    assert test.multiselect("runs").value == ["baseline", "zero1"]
    assert "The same work" in test.success[0].value and "equal loss: yes" in test.success[0].value
    assert not test.warning
    row = table(test, "figure").set_index("figure").loc["speed-up in training time"]
    assert (row["baseline"], row["zero1"]) == ("1.00x", "1.67x")


def test_unequal_work_is_marked_with_what_differs(runs, open_page):
    write_run(runs / "large", record(training_config__global_batch_size=32), lines=step_lines(shift=0.5))
    test = open_page("compare", query={"runs": ["baseline", "large"]})
    assert test.multiselect("runs").value == ["baseline", "large"]
    (warning,) = test.warning
    assert warning.value.startswith("**NOT EQUAL WORK**: global batch 8 vs 32")
    test.segmented_control("figure").set_value("speed-up").run()
    heading = test.get("html")[0].proto.body
    assert "<h2" in heading and "NOT EQUAL WORK" in heading


def test_the_committed_sweeps_are_compared(open_page):
    test = open_page("compare", folder=REPOSITORY / "checkpoint")
    test.segmented_control("kind").set_value("Sweeps").run()
    test.selectbox("sweep").set_value("reference/cpu-2-cores/sweep-strategies.json").run()
    rows = dict(zip(column(test, "cell"), column(test, "speed-up"), strict=True))
    readme = (REPOSITORY / "README.md").read_text()
    assert f"| ddp on 2 devices | 2 | {rows['ddp on 2 devices']:.2f}x" in readme


def test_foreign_text_is_no_markup(runs, open_page):
    """Neither in messages about a damaged record, nor in the name of the fastest run."""
    folder = runs / EVIL.replace("/", "")
    write_run(folder, {EVIL: 1})
    fast = record(training_config__strategy="ddp", summary__train_time_sec=5.0)
    write_run(runs / f"fast {folder.name}", fast, lines=step_lines(seconds=0.1))
    for page, query in (("overview", None), ("compare", {"runs": [folder.name]}), ("live", {"watch": [folder.name]})):
        said = texts(open_page(page, query=query))
        assert "\\*x\\*" in said, page
        unescaped = re.sub(r"`[^`\\]*`|\\.", "", said)
        assert not re.search(r"[<>$\[\]`]|:(?=red|smile)", unescaped), (page, unescaped)


def test_a_run_is_watched_from_its_start_until_it_is_killed(runs, open_page):
    run = runs / "new"
    run.mkdir()
    with Lock.of_file(run / ".lock") as lock:
        lock.take()
        test = open_page("live")
        assert "**new** is **running**" in texts(test)
        values = record(status="running", host=None)
        values["training_config"]["total_steps"] = 400
        values["goodput"] = {"share": 0.9, "lost_sec": {"start": 12.0, "gaps": None, "repeated": 100.0, "data": 0.0}}
        values["second_copy"] = {"behind_steps": 40}
        write_run(run, values, lines=step_lines(steps=10))
        test.run()
        said = "Goodput 90.0% of the wall time, in steps that are kept. Lost: start 12 s, repeated 1 min 40 s."
        assert f"{said} The second copy is 40 steps behind." in texts(test)
        assert metrics(test)["Training loss"] == f"{step_lines(steps=10)[-2]['loss']:.4f}"
        assert "Rank 0" in metrics(test)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(11, 1.25, tokens_per_sec=7e3))
        log = ["<b>*x*</b> \x1b[31m \udc80", "  0%|\r 50%|\r100%|", *(f"step {step}" for step in range(18))]
        (run / "train.log").write_bytes(b"x" * 99_999 + "\n".join(["", *log]).encode(errors="surrogateescape"))
        test.run()
        assert metrics(test)["Training loss"] == "1.2500" and metrics(test)["Tokens/s"] == "7,000"
        shown = ["<b>*x*</b> \ufffd[31m \ufffd", "100%|", *(f"step {step}" for step in range(18))]
        assert test.code[0].value == "\n".join(shown)
    test.run()
    assert "No run is training now" in texts(test)
    test.multiselect("watch").set_value(["new"]).run()
    assert "**new** is **abandoned**" in texts(test)


def test_many_runs_are_a_table_and_gpus_are_shown_as_sampled(runs, open_page):
    write_run(runs / "short", record(status="interrupted"), lines=step_lines(steps=4))
    gpu = {"uuid": "a", "utilisation": 0.5, "memory_used_bytes": 2e9, "power_watts": 70.0, "temperature_celsius": 60}
    lines = [{"time": 100.0 + second, "gpus": [gpu, {**gpu, "utilisation": 1.0}]} for second in range(3)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (runs / "zero1" / "hardware.jsonl").write_text(text + '{"time": 5, "gpus": [7]}\nbroken\n{"ti')
    test = open_page("live", query={"watch": ["short", "zero1"]})
    assert (column(test, "run"), column(test, "step")) == (["zero1", "short"], [40, 4])
    assert column(test, "GPU", table=1) == ["GPU 0", "GPU 1"]
    assert column(test, "utilisation (%)", table=1) == [50.0, 100.0]
    assert column(test, "memory (GB)", table=1) == [2.0, 2.0]


def test_the_server_listens_here_alone_and_reports_nothing():
    assert SETTINGS["server"]["address"] == "127.0.0.1" and SETTINGS["server"]["enableXsrfProtection"] is True
    assert SETTINGS["browser"]["gatherUsageStats"] is False


def test_the_colours_are_those_of_the_charts():
    for theme in (LIGHT, DARK):
        given = SETTINGS["theme"][theme.name]
        assert given["chartCategoricalColors"] == list(theme.palette)
        assert (given["backgroundColor"], given["textColor"]) == (theme.background, theme.ink)


def test_a_spreadsheet_computes_no_cell_of_a_table():
    columns = {"run": ["=1+1", "@SUM(A1)", 'a,"b'], "loss": [1.5, -2.0, None]}
    assert as_csv(columns).decode().splitlines() == ["run,loss", "'=1+1,1.5", "'@SUM(A1),-2.0", '"a,""b",']


def leaves(value, place=()):
    """The path of every value in a record, and of every object and list."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(path for key, each in inner for path in leaves(each, (*place, key)))]


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("hostile", [1e308, 1e-308, "0001-01-01T00:00:00", "\ud800", math.nan], ids=repr)
def test_one_bad_record_takes_no_page_away(runs, open_page, hostile):
    """Whatever stands in a field of a record, of a step's line or of a sample, alone or in all fields."""
    good = record(timestamp_utc="2026-11-22T10:00:00+00:00", status="running")
    line = {**step_lines(steps=1)[0], "val_loss": 3.0, "tokens_per_sec": 5.0, "interval": {"mfu": 0.5}}
    values = [replaced(good, path, hostile) for path in leaves(good)]
    for place, value in enumerate(values):
        write_run(runs / f"record-{place}", value, lines=step_lines(steps=3))
    for place, path in enumerate(leaves(line)[1:]):
        write_run(runs / f"line-{place}", good, lines=[line, replaced({**line, "step": 2}, path, hostile)])
    sample = {"time": 1.0, "gpus": [{"utilisation": hostile, "power_watts": hostile}]}
    (runs / "line-0" / "hardware.jsonl").write_text(json.dumps(sample) + "\n")
    names = sorted(path.name for path in runs.iterdir())
    assert len(column(open_page("overview"), "run")) == len(names)
    open_page("compare", query={"runs": ["baseline", *names[:: len(names) // 6][:7]]})
    open_page("live", query={"watch": ["line-0", *names[:: len(names) // 9][:9]]})


def test_a_name_that_is_not_utf_8_is_one_line_on_every_page(runs, open_page):
    write_run(runs / os.fsdecode(b"reference/caf\xe9"), record())
    (runs / os.fsdecode(b"reference/caf\xe9/plan.json")).write_text("{}")
    for page in ("overview", "compare", "live", "spikes", "split", "plan", "generate"):
        open_page(page)
    frame = AppTest.from_file(REPOSITORY / "charts" / "dashboard.py", default_timeout=60).run()
    assert not frame.exception
    said = r"**reference/caf\\xe9** is not shown: its name is not UTF-8; rename it"
    assert [each.value for each in (*frame.title, *frame.warning)] == ["Overview", said]


def test_my_runs_are_compared_and_the_references_only_when_asked(runs, open_page):
    fast = record(training_config__strategy="zero1", summary__train_time_sec=1.0, timestamp_utc="2027-01-01T00:00:00")
    write_run(runs / "reference" / "theirs", fast, lines=step_lines(seconds=0.1))
    test = open_page("overview")
    assert metrics(test)["Fastest of equal work"] == "zero1"
    assert column(test, "run") == ["baseline", "zero1", "theirs (another machine)"]
    assert open_page("compare").multiselect("runs").value == ["baseline", "zero1"]
    asked = open_page("compare", query={"runs": ["baseline", "reference/theirs"]})
    assert "theirs (another machine) against baseline" in texts(asked).replace("\\", "")
    assert "zero1" not in texts(open_page("live")) and "theirs" not in texts(open_page("live"))


def test_runs_that_differ_in_the_seed_alone_are_their_mean_and_range_when_asked(runs, open_page):
    """By hand: of 100, 130 and 160 s the mean is 130; the losses are those of the first plus 0, 0.1 and 0.5."""
    for place, shift in enumerate((0.1, 0.5), start=1):
        values = record(training_config__seed=7 + place, summary__train_time_sec=100.0 + 30 * place)
        values["summary"]["final_val_loss"] = 3.25 + shift
        write_run(runs / f"seed-{place}", values, lines=step_lines(shift=shift, every=10 * place))
    for seed, seconds in ((7, 150.0), (8, 170.0)):
        values = record(training_config__seed=seed, training_config__compile=True, summary__train_time_sec=seconds)
        write_run(runs / f"compiled-{seed}", values, lines=step_lines())
    names = ["baseline", "seed-1", "zero1", "seed-2", "compiled-7", "compiled-8"]
    test = open_page("compare", query={"runs": names}, **{"losses-numbers": True, "smoothing": 1})
    assert {*table(test, "figure")} >= {*names}
    test.toggle("seeds").set_value(True).run()
    assert not test.exception
    mean, figures = "baseline (mean of 3 seeds)", table(test, "figure").set_index("figure")
    assert figures.columns[:3].tolist() == [mean, "zero1", "compiled-7 (mean of 2 seeds)"]
    assert figures.loc["training time (s)", mean] == "130.0 (100.0 to 160.0)"
    assert figures.loc["final validation loss (nats per token)", mean] == "3.4500 (3.2500 to 3.7500)"
    assert figures.loc["speed-up in training time", "zero1"].startswith("2.17x")
    assert [*figures.loc["training time (s)"]][3:] == ["+53.8 %", "no difference"]  # 150 to 170 s and 100 to 160 s
    assert table(test, "fact").set_index("fact").loc["seed", mean] == "7, 8, 9"
    for kind, key, steps in (("training", "loss", 40), ("validation", "val_loss", 2)):
        test.segmented_control("loss").set_value(kind).run()
        losses = table(test, "least")
        band, first = losses[losses["run"] == mean], [line[key] for line in step_lines() if key in line][-1]
        found = [band.iloc[-1][name] for name in (f"{kind} loss (nats per token)", "least", "most")]
        assert len(band) == steps and found == pytest.approx([first + 0.2, first, first + 0.5])


# What the pages read while runs write: steps, the folder, and what became of a run.


COMMITTED = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores"


def line(step: int, loss: float | None = 5.0, **others: object) -> str:
    return json.dumps({"step": step, "loss": loss, "tokens": 8 * step, **others}) + "\n"


def test_steps_are_those_that_the_charts_read():
    path = COMMITTED / "demo-zero1" / "metrics.jsonl"
    steps = StepReader(path).read()
    train, validation, _ = read_step_curves(path, [])
    assert steps.train["step"].tolist() == [point.step for point in train.points]
    assert steps.train["loss"].tolist() == [point.loss for point in train.points]
    assert steps.validation["val_loss"].tolist() == [point.loss for point in validation.points]
    assert steps.validation["tokens"].tolist() == [point.tokens for point in validation.points]
    assert steps.damaged == 0
    assert _parsed(path.read_bytes()) is not None  # not one by one


def test_what_is_appended_is_added_and_a_torn_line_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2)[:9])
    reader = StepReader(path)
    first = reader.read()
    assert first.train["step"].tolist() == [1] and first.damaged == 0
    with path.open("a") as file:
        file.write(line(2)[9:] + "no JSON\n" + line(3, None) + json.dumps({"step": 3, "val_loss": 4.0}) + "\n")
    now = reader.read()
    assert now.train["step"].tolist() == [1, 2, 3] and now.damaged == 1
    assert np.isnan(now.train["loss"][2])
    assert now.validation["tokens"].tolist() == [24]
    assert first.train["step"].tolist() == [1], "what a page holds does not change"


@pytest.mark.parametrize(
    "broken",
    [
        *(b'"loss": NaN', b'"loss": null', b'"lr": 1e308', b'"lr": 1e-308', b'"lr": "x"', b'"tokens": null'),
        *(b'"warm_up": null', b'"lr": 1e999', b'"a": [[1]]', b'"a": "\\ud800"', b'"a": "\xff"', b'"a": 1, "a": 2'),
        *(b'"a": {"loss": 1}', b'"a": 1}{"b": 2', b'"a": {\n"b": 1}', b'"a": 1,}\n{', b'"step": 1.5', b'"a" : 1', b""),
        *(b'"interval": {"mfu": "x"}', b'"interval": null', b'"val_loss": 2', b'"a": "' + b"x" * 70_000 + b'"'),
    ],
)
def test_lines_parsed_together_are_those_parsed_one_by_one(tmp_path, monkeypatch, broken):
    """Whatever one of them holds, beside the lines of a real run, and where two reads meet in a line."""
    whole = (COMMITTED / "demo-zero1" / "metrics.jsonl").read_bytes()
    first, _, rest = whole.partition(b"\n")
    path, found = tmp_path / "metrics.jsonl", []
    for least in (0, len(whole) * 2):
        monkeypatch.setattr("dsgpt.dashboard.reading._LEAST_BYTES", least)
        path.write_bytes(whole + first.replace(b'"epoch": 0', broken or b'"epoch": 0')[:-9])
        reader = StepReader(path)
        assert reader.read().train["step"][-1] == 800
        with path.open("ab") as file:
            file.write(first[-9:] + b"\n" + rest)
        found.append(reader.read())
    one, other = found
    assert one.damaged == other.damaged
    for part in ("train", "validation"):
        columns = [*getattr(one, part).items()]
        assert all(np.array_equal(values, getattr(other, part)[name], equal_nan=True) for name, values in columns)


def test_a_file_that_another_run_writes_anew_is_read_anew_and_a_step_written_twice_counts_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in (2, 9):  # a shorter and a longer one
        path.write_text("".join(line(step, 5.0) for step in range(1, 6)))
        reader = StepReader(path)
        assert reader.read().train["step"][-1] == 5
        path.write_text("".join(line(step, 7.0) for step in range(1, steps + 1)))  # the inode stays the same
        assert reader.read().train["loss"].tolist() == [7.0] * steps
    path.write_text(line(1, 1.0) + line(2, 2.0) + line(3, 3.0) + line(2, 9.0))
    now = reader.read()
    assert now.train["step"].tolist() == [1, 2, 3] and now.train["loss"].tolist() == [1.0, 9.0, 3.0]


def test_downsampling_keeps_every_peak_and_both_ends_and_smoothing_leaves_out_what_is_missing():
    values = np.zeros(10_000)
    values[[777, 5001]] = 9.0, -9.0
    values[:3] = np.nan
    places = thinned(values, points=100)
    assert len(places) <= 100 and {0, 777, 5001, 9999} <= {*places.tolist()}
    assert thinned(values[:50], points=100).tolist() == list(range(50))
    assert smoothed(np.array([1.0, np.nan, 3.0, 5.0]), window=2).tolist() == [1.0, 1.0, 3.0, 4.0]


def test_names_lead_nowhere_else(tmp_path):
    runs, secret = tmp_path / "runs", tmp_path / "secret"
    write_run(runs / "a", {})
    write_run(secret, {})
    (runs / "link").symlink_to(secret)
    (runs / "a" / "metrics.jsonl").symlink_to(secret / "training_metrics.json")
    assert contents(runs).runs == ("a",)
    assert inside(runs, "a") == runs / "a"
    for name in ("../secret", "/etc", "a/../../secret", "link", "a/metrics.jsonl", "", "a\0b", "nothing"):
        with pytest.raises(UserError):
            inside(runs, name)
    with pytest.raises(UserError, match="is a link"):
        own_file(runs / "a", "metrics.jsonl")
    assert own_file(runs / "a", "hardware.jsonl") is None


def test_a_record_that_says_running_is_believed_only_while_something_lives(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    for host, locks_known, silent_sec, expected in (
        ("here", True, 1.0, Status.ABANDONED),
        ("there", True, SILENT_SEC, Status.ABANDONED),
        ("here", False, 1.0, Status.RUNNING),
        ("here", False, None, Status.ABANDONED),
    ):
        assert status_of("running", host=host, signs=Signs(None, locks_known, silent_sec))[0] == expected


SMALL = PRESETS["small"].as_dict()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_size": "small", "model": SMALL | {"vocab_size": 9, "dropout": 0.1}, "parameters": 9e7}, "small (90M)"),
        ({"model_size": "small", "model": SMALL | {"n_layer": 1}, "parameters": 4.5e5}, "1 x 768 (0.45M)"),
        ({"model_size": "distilgpt2", "model": SMALL | {"n_layer": 6}, "parameters": 82e6}, "distilgpt2 (82M)"),
        ({"model": {"n_layer": 2, "n_embd": 64}, "parameters": 1.5e9}, "2 x 64 (1.5B)"),
    ],
)  # fmt: skip
def test_a_model_is_called_by_its_size_only_if_it_has_its_shape(config, name):
    assert model_name(Fields(config, notes=[])) == name


def test_steps_that_stand_out_and_the_documents_that_they_read(runs, open_page, tmp_path):
    """A step stands out if it reads document 7, whose tokens 182 to 207 are in the windows 11 and 12."""
    data = write_documents(tmp_path / "data", [f"document {number:02}, and its text" for number in range(64)])
    file = open_data(data / "train.bin", flag="")
    batches = file.order(16, global_batch_size=8, seed=7).batches(0, 100).tolist()
    out = [step for step, windows in enumerate(batches, start=1) if {11, 12} & {*windows}]
    lines = [{"step": step, "loss": 3 + step % 5 / 100 + (step in out)} for step in range(1, 101)]
    lines[99]["loss"] = None  # not finite
    values = record(training_config__seq_len=16)
    values["training_config"]["total_steps"] = 100
    values["data"] |= {"train_path": str(data / "train.bin"), "train_sha256": file.files[0].sidecar.sha256}
    write_run(runs / "spiky", values, lines=lines)
    test = open_page("spikes", query={"run": ["spiky"]})
    expected = sorted({100, *(step for step in out if step > 32)})
    assert f"{len(expected)} of 68 steps stand out; 32 more cannot be judged" in texts(test)
    assert table(test, "gradient norm")["step"].tolist() == expected
    test.toggle("documents").set_value(True).run()
    found = table(test, "by chance")
    assert (found["document"][0], found["stand out"][0]) == (7, len(expected) - 1)  # step 100 did not read it
    assert "document 07" in found["text"][0]
    for change, said in (({"total_steps": 0}, "does not say"), ({"global_batch_size": 10**9}, "is not what the steps")):
        write_run(runs / "spiky", {**values, "training_config": values["training_config"] | change})
        assert said in texts(test.run())
