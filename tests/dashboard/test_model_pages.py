"""The pages about models: plan, split, and try it."""

import itertools
import json
import re
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from small_run import REPOSITORY

from dsgpt.charts.memory import draw_plan
from dsgpt.charts.themes import DARK, LIGHT
from dsgpt.common.text import byte_size, dollars, estimate
from dsgpt.dashboard.generate import Answer, _opened, generate
from dsgpt.dashboard.pictures import state_by_rank, state_svg, step_lines, step_svg
from dsgpt.dashboard.plan import gpus_table, machines, offers_table, planned, ways_table
from dsgpt.dashboard.split import CHOICES, copied_rows, explanations, sent_rows, split_of
from dsgpt.inference.commands import GenerateRequest
from dsgpt.inference.generation import Text, Writer
from dsgpt.inference.model_files import load
from dsgpt.planner.formulas import model_state, peak_memory, step_traffic
from dsgpt.planner.options import PlanOptions, read_plan_options, words_of
from dsgpt.planner.plan import Plan, size, with_assumptions
from dsgpt.planner.search import act, recommendation_files
from dsgpt.planner.step_time import bubble_fraction

# Plan and cost: every figure is what `src/plan.py` prints for the command that the page shows.


RECORD = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "plan.json"
ONE = PlanOptions(model_size="medium", strategy="zero2", gpu="a100-80gb", gpus=8, tokens=3e9)
BEST = PlanOptions(model_size="small", gpu="l4", gpus=2, tokens=1e9, recommend=True, deadline=5 * 3600.0, budget=18.0)


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """What ``src/plan.py`` prints with ``--json``."""
    options, problems = read_plan_options([*words, "--json"])
    assert act(options, problems, draw=draw_plan) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_says_what_the_page_asked_for():
    measured = PlanOptions(machine=RECORD, measured=(RECORD,), gpus=2, tokens=1e7, activation_checkpointing=True)
    cheap = PlanOptions(gpu="t4", tokens=12345.5, deadline=5400.0, recommend=True, spot=True, network_gbps=12.5)
    for options in (ONE, BEST, measured, cheap):
        assert read_plan_options(words_of(options))[0] == options


def test_the_recommendation_is_what_the_command_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = planned(words_of(BEST))
    told = printed(words_of(BEST), capsys)
    assert told["recommended"] == {"name": done.plan.name, "plan": with_assumptions(done.plan)}
    files = recommendation_files(done.plan)
    assert [path.as_posix() for path in files] == told["written"]
    assert {path: path.read_bytes() for path in files} == files
    ways = ways_table(done.searched)
    assert ways["way"] == [each["name"] for each in (*told["ranked"], *told["refused"])]
    assert told["ranked"] and told["refused"]
    assert ways["why not"] == [""] * len(told["ranked"]) + [each["reason"] for each in told["refused"]]


def test_offers_are_of_both_kinds_and_the_cheapest_is_first():
    done, spot = (planned(words_of(replace(ONE, gpu="a100-40gb", spot=spot))) for spot in (False, True))
    expected = sorted(cost.usd for each in (done, spot) for cost in each.plan.costs)
    assert offers_table(done)["US dollars"] == pytest.approx(expected, abs=0.005) and done.plan.costs != spot.plan.costs


def test_other_gpus_have_their_own_plan_or_a_reason():
    done = planned([*words_of(ONE), "--precision", "bf16"])
    table = gpus_table(done)
    same = table["GPU"].index("a100-80gb")
    assert table["training, hours"][same] == pytest.approx(done.plan.run.seconds / 3600, abs=0.005)
    assert "has no units for it" in table["fits"][table["GPU"].index("t4")]


def test_a_measured_machine_is_planned_for_with_its_own_steps(tmp_path, capsys):
    place = tmp_path / "reference" / "mine" / "plan.json"
    place.parent.mkdir(parents=True)
    shutil.copy(RECORD, place)
    (tmp_path / "calibration.json").write_text("{", encoding="utf-8")
    (measured, *table), (broken,) = machines(tmp_path)  # the broken one hides nothing else
    assert "calibration.json" in broken and measured.devices == 2 and {each.devices for each in table} == {None}
    options = PlanOptions(**dict(measured.flags), model_size="tiny", gpus=2, tokens=1e7)
    done = planned(words_of(options))
    assert not done.plan.machine.assumed and "fitted to measured steps" in done.plan.machine.basis
    assert with_assumptions(done.plan) == printed(words_of(options), capsys)


def test_the_page_shows_the_figures_of_its_own_command_or_loudly_that_it_does_not_fit(tmp_path, capsys, open_page):
    page = open_page("plan", folder=tmp_path)
    page.select_slider(key="plan-tokens").set_value(3e9).run()
    (command,) = [code.value for code in page.code if "src/plan.py" in code.value]
    words = [word.replace("ds_configs", f"{REPOSITORY}/ds_configs") for word in shlex.split(command)[2:]]
    told = printed(words, capsys)
    shown = {metric.label: metric.value for metric in page.metric}
    assert shown == {
        "Memory of a device": size(told["memory"]["bytes"]),
        "Tokens/s": f"{told['step']['tokens_per_sec']:,.0f}",
        "Training": estimate(told["training"]["seconds"]),
        "Cost": dollars(told["costs"][0]["usd"]),
    }
    assert re.search(r"Not measured.*[Ff]or \d+ measured rows? like this one", page.info[0].value) and not page.error
    page.number_input(key="plan-mtbf").set_value(8.0).run()
    assert " --mtbf 8h" in next(code.value for code in page.code if "src/plan.py" in code.value)
    assert any("goodput " in caption.value for caption in page.caption) and not page.error
    page.selectbox(key="plan-model").set_value("xl").run()
    page.select_slider(key="plan-count").set_value(1).run()
    page.number_input(key="plan-micro").set_value(32).run()
    assert not page.metric and page.error[0].value.startswith("### DOES NOT FIT\n")


# How it is split: the figures are the planner's, and the pictures are true to them.


POSSIBLE = [name for name in CHOICES if name not in {"ZeRO++", "One device"}]


def split(name: str, **flags) -> Plan:
    given = {"model_size": "small", "gpu": "a100-80gb", "gpus": 4, "global_batch_size": 32} | flags
    return split_of(CHOICES[name], **given)


@pytest.mark.parametrize("name", POSSIBLE)
def test_blocks_add_up_to_the_peak_of_the_headline(name):
    """What a step holds at different moments is never added up."""
    found = split(name)
    for each in state_by_rank(found.setup, ranks=4):
        assert each.total("device") == peak_memory(found.setup, rank=each.rank, device="cuda").total
        state = model_state(found.setup, rank=each.rank)
        assert each.total("host", "files") == sum(state.off_device.values())
        for block in each.blocks:
            assert 0 <= block.start <= block.start + block.size / block.whole <= 1.0001
    headline = max(each.total("device") for each in state_by_rank(found.setup, ranks=4))
    assert headline == found.peak.total


def test_the_shards_of_all_ranks_make_up_the_whole():
    for name in ("ZeRO-1", "ZeRO-3", "FSDP", "3D: pipeline and tensor"):
        blocks = [each.blocks for each in state_by_rank(split(name).setup, ranks=4)]
        optimizer = [block for own in blocks for block in own if block.kind == "optimizer state"]
        assert all(block.is_shard for block in optimizer), name
        covered = sum(block.size for block in optimizer) / optimizer[0].whole
        assert 1 <= covered < 2, name  # both ends of a pipeline, and all tensor ranks, hold the embedding
        ends = sorted((block.start, block.start + block.size / block.whole) for block in optimizer)
        assert all(start <= end + 0.01 for (_, end), (start, _) in itertools.pairwise(ends)), name
        assert ends[-1][1] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", POSSIBLE)
def test_every_block_is_drawn_to_scale_with_its_bytes(name):
    setup = split(name).setup
    states = state_by_rank(setup, ranks=8)
    boxes = {}
    for shape in ET.fromstring(state_svg(states, ranks=4, theme=LIGHT)).iter("{http://www.w3.org/2000/svg}rect"):
        title = shape.findtext("{http://www.w3.org/2000/svg}title")
        if re.match(r"rank \d", title or ""):
            boxes[title] = float(shape.get("height", 0))
    blocks = [(each.rank, block) for each in states for block in each.blocks]
    assert len(boxes) == len(blocks)
    largest = max((block.size, height) for (_, block), height in zip(blocks, boxes.values(), strict=True))
    for (rank, block), (title, height) in zip(blocks, boxes.items(), strict=True):
        assert title.startswith(f"rank {rank}, {block.kind}: {byte_size(block.size)}")
        assert height == pytest.approx(max(1.0, block.size * largest[1] / largest[0]), abs=0.02)


@pytest.mark.parametrize("name", POSSIBLE)
def test_every_operation_is_in_the_picture_and_in_the_table(name):
    setup = split(name).setup
    rows = sent_rows(setup)
    planned = sum(traffic.payload_bytes for rank in setup.first_ranks for traffic in step_traffic(setup, rank=rank))
    assert sum(row["payload per step, bytes"] for row in rows) == planned
    lines = step_lines(setup)
    lanes = [bar.lane for bars in lines.values() for bar in bars if bar.lane != "computes"]
    assert len(lanes) == sum(row["times"] for row in (*rows, *copied_rows(setup)))
    titles = [title.text for title in ET.fromstring(step_svg(lines, DARK)).iter("{http://www.w3.org/2000/svg}title")]
    for row in rows:
        words = f"{row['operation']}, {byte_size(row['payload, bytes'])}, among {row['among']}: "
        assert any(title and title.startswith(words) for title in titles)


def test_offload_copies_the_optimizer_state_to_files_and_back():
    setup = split("ZeRO-3, NVMe", gpus=2).setup
    rows, sizes = copied_rows(setup), model_state(setup)
    state = [row for row in rows if row["what"] == "optimizer state"]
    assert {row["between"] for row in state} == {"from files to host", "from host to files"}
    assert sum(row["bytes per step"] for row in state) == pytest.approx(2 * (sizes.optimizer + sizes.master), rel=1e-3)


def test_many_micro_batches_are_drawn_as_one_gap():
    setup = split("ZeRO-2", global_batch_size=64, micro_batch_size_per_gpu=1).setup
    (bars,) = step_lines(setup).values()
    assert "+13" in [bar.label for bar in bars]
    assert [row["times"] for row in sent_rows(setup)] == [16, 1]


def test_the_drawn_pipeline_has_the_planned_bubble():
    """The passes of a stage take the share of the time that the planner's formula leaves them."""
    setup = split("Pipeline parallel", micro_batch_size_per_gpu=4).setup
    batches = setup.gradient_accumulation_steps
    lines = step_lines(setup)
    ends = [[bar.end for bar in bars if bar.label.startswith(("forward", "backward"))] for bars in lines.values()]
    busy, whole = 3.0 * batches, max(map(max, ends))
    assert 1 - busy / whole == pytest.approx(bubble_fraction(2, batches))
    told = dict(explanations(setup))["Pipeline parallel (1F1B)"]
    assert f"{bubble_fraction(2, batches):.0%}" in told


def test_the_page_shows_the_planners_figures(tmp_path, open_page):
    page = open_page("split", folder=tmp_path)
    shown = {metric.label: metric.value for metric in page.metric}
    assert page.markdown[0].value.startswith("**zero1** in bf16")
    assert shown["Peak memory of rank 0"] == byte_size(split("ZeRO-1", global_batch_size=None).peak.total)
    page.selectbox(key="split-strategy").set_value("3D: pipeline and tensor").run()
    assert any("ZeRO-1 has nothing to divide" in each.value for each in page.markdown)
    page.selectbox(key="split-model").set_value("xl").run()
    assert not page.exception and "does not divide the model's 25 heads" in page.error[0].value


# Try it: the text of the page is the text of `src/generate.py`, and nobody's request disturbs another's.


PROMPT = "def ma"


@pytest.fixture(scope="module")
def runs(checkpoint_with_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run; tests only read it."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(checkpoint_with_tokenizer.parent, folder / "one")
    return folder


def request_of(runs: Path, **changes) -> GenerateRequest:
    given = {"max_new_tokens": 8, "seed": 1, "device": "cpu"} | changes
    return GenerateRequest(checkpoint=runs / "one" / "step-00000001", **given)


def told(runs: Path, *, prompt: str = PROMPT, **changes) -> Answer:
    found = Answer(name="one/step-00000001", prompt=prompt)
    generate(found, request_of(runs, **changes))
    return found


def written(runs: Path, *, prompt: str = PROMPT, **changes) -> Text:
    """The text of ``src/generate.py``, whose one writer reads its model itself."""
    (text,) = Writer(request_of(runs, **changes)).texts([prompt])
    return text


@pytest.mark.parametrize(
    "changes", [{}, {"seed": 2}, {"temperature": 0.0}, {"top_k": 5, "repetition_penalty": 1.3}, {"stop": ("e",)}]
)
def test_text_and_ids_are_those_of_the_script(runs, changes):
    expected, answer = written(runs, **changes), told(runs, **changes)
    assert (answer.text, answer.ids, answer.ended) == (str(expected), expected.ids, expected.ended)
    assert answer.tokens == len(expected.ids)


@pytest.fixture
def loaded(monkeypatch) -> list[Path]:
    """The checkpoints of the models that are opened during a test, which begins without one in memory."""
    opened: list[Path] = []

    def note(request: GenerateRequest) -> Writer:
        opened.append(request.checkpoint)
        return Writer(request)

    _opened.clear()
    monkeypatch.setattr("dsgpt.inference.generation.Writer", note)
    return opened


def test_two_texts_at_once_are_what_each_is_alone_and_share_a_model(runs, loaded):
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda seed: told(runs, seed=seed).text, range(6)))
    assert together == [told(runs, seed=seed).text for seed in range(6)]
    assert len(loaded) == 1


def test_a_stop_keeps_the_text_so_far(runs):
    class Pressed(Exception):
        pass

    found, shown = Answer(name="one", prompt=PROMPT), []

    def stop() -> None:
        shown.append(found.text)
        if len(shown) == 4:  # the prompt, and three tokens
            raise Pressed

    with pytest.raises(Pressed):
        generate(found, request_of(runs), show=stop)
    assert shown[0] == PROMPT and found.text == shown[-1] and found.text.startswith(PROMPT)
    assert (found.tokens, found.ended) == (3, "stopped")
    assert told(runs).text == str(written(runs))


def test_the_likeliest_ids_are_those_of_the_model(runs):
    model = load(runs / "one", which="latest", device=torch.device("cpu"), precision="fp32").model
    ids = Writer(request_of(runs)).tokenizer.encode(PROMPT, add_special_tokens=False)
    with torch.inference_mode():
        expected = model(torch.tensor([ids]))[0, -1, : model.config.vocab_size].float().softmax(dim=0).topk(10)
    found = [each for _, each in told(runs, temperature=1.0, top_k=2).likeliest]
    assert [each.id for each in found] == expected.indices.tolist()
    assert [each.probability for each in found] == pytest.approx(expected.values.tolist(), rel=1e-4)
    two = expected.values[:2] / expected.values[:2].sum()
    assert [each.drawn for each in found] == pytest.approx([*two.tolist(), *[0.0] * 8], rel=1e-4)
    assert [each.drawn for _, each in told(runs, temperature=0.0).likeliest] == [1.0] + [0.0] * 9


@pytest.fixture
def copied(runs, tmp_path) -> Path:
    """A copy of the checkpoint, in a run ``one`` below ``tmp_path``."""
    return shutil.copytree(runs / "one", tmp_path / "one") / "step-00000001"


def test_a_damaged_checkpoint_is_named(runs, copied, tmp_path):
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    refused = told(tmp_path).refused
    assert "model.safetensors" in refused and "\n" not in refused and "--checkpoint" not in refused
    assert told(runs).refused == ""


def test_another_version_of_a_checkpoint_is_loaded_anew(copied, tmp_path, loaded):
    told(tmp_path)
    told(tmp_path, seed=2)
    assert loaded == [copied]
    again = shutil.copy2(copied / "manifest.json", tmp_path / "another")  # of the same size and time
    again.replace(copied / "manifest.json")
    told(tmp_path)
    assert loaded == [copied, copied]


def test_only_checkpoints_inside_the_folder_are_offered(runs, copied, tmp_path, open_page):
    copied.with_name("step-00000009").symlink_to(runs / "one" / "step-00000001")
    page = open_page("generate", folder=tmp_path)
    assert page.selectbox(key="generate-first").options == ["one/step-00000001"]


def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_page(runs, open_page):
    page = open_page("generate")
    page.text_area(key="generate-prompt").set_value("x " * 500)
    page.button[0].click().run()
    assert page.error[0].value.startswith("Prompt has ") and "shorten it" in page.error[0].value
