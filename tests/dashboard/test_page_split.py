"""How it is split: the figures are the planner's, and the pictures are true to them."""

import itertools
import re
from xml.etree import ElementTree as ET

import pytest
from opened_pages import open_page
from small_run import REPOSITORY

from dsgpt.charts.options import DARK, LIGHT
from dsgpt.common.errors import UserError
from dsgpt.dashboard.formats import memory
from dsgpt.dashboard.pictures import Line, holding_svg, holdings, step_lines, step_svg
from dsgpt.dashboard.split import CHOICES, Split, copied_rows, held_rows, lessons, sent_rows, split_of
from dsgpt.planner.memory import peak_memory
from dsgpt.planner.model_state import model_state
from dsgpt.planner.step_time import bubble_fraction
from dsgpt.planner.traffic import step_traffic

CHOSEN = {choice.name: choice for choice in CHOICES}
POSSIBLE = [name for name in CHOSEN if name not in {"ZeRO++", "One device"}]


def split(name: str, **flags) -> Split:
    given = {"model_size": "small", "gpu": "a100-80gb", "gpus": 4, "global_batch_size": 32} | flags
    return split_of(CHOSEN[name], repository=REPOSITORY, **given)


@pytest.mark.parametrize("size", ["small", "xl"])
@pytest.mark.parametrize("name", POSSIBLE)
def test_blocks_add_up_to_the_peak_of_the_headline(name, size):
    """What a step holds at different moments is never added up."""
    try:
        found = split(name, model_size=size)
    except UserError as error:
        assert "does not divide the model's 25 heads" in str(error)
        return
    for each in holdings(found.setup, ranks=4):
        assert each.total("device") == peak_memory(found.setup, rank=each.rank, device="cuda").total
        state = model_state(found.setup, rank=each.rank)
        assert each.total("host", "files") == sum(state.off_device.values())
        for block in each.blocks:
            assert 0 <= block.start <= block.start + block.size / block.whole <= 1.0001
    headline = max(each.total("device") for each in holdings(found.setup, ranks=4))
    assert headline == found.peak.total


def test_the_shards_of_all_ranks_make_up_the_whole():
    for name in ("ZeRO-1", "ZeRO-3", "FSDP", "3D: pipeline and tensor"):
        blocks = [each.blocks for each in holdings(split(name).setup, ranks=4)]
        optimizer = [block for own in blocks for block in own if block.kind == "optimizer state"]
        assert all(block.is_shard for block in optimizer), name
        covered = sum(block.size for block in optimizer) / optimizer[0].whole
        assert 1 <= covered < 2, name  # both ends of a pipeline, and all tensor ranks, hold the embedding
        ends = sorted((block.start, block.start + block.size / block.whole) for block in optimizer)
        assert all(start <= end + 0.01 for (_, end), (start, _) in itertools.pairwise(ends)), name
        assert ends[-1][1] == pytest.approx(1, abs=0.01)


def test_ddp_and_the_ends_of_zero_hold_what_the_words_say():
    assert not any(block.is_shard for each in holdings(split("DDP").setup, ranks=4) for block in each.blocks)
    shards = {
        block.kind
        for block in holdings(split("ZeRO-2", global_batch_size=64).setup, ranks=1)[0].blocks
        if block.is_shard
    }
    assert shards == {"gradients", "optimizer state", "master weights"}
    away = {block.kind: block.place for block in holdings(split("ZeRO-3, NVMe").setup, ranks=1)[0].blocks}
    assert away["optimizer state"] == away["weights"] == "files"
    assert away["activations"] == "device"


@pytest.mark.parametrize("name", POSSIBLE)
def test_every_block_is_drawn_to_scale_with_its_bytes(name):
    setup = split(name).setup
    held = holdings(setup, ranks=8)
    boxes = {}
    for shape in ET.fromstring(holding_svg(held, ranks=4, theme=LIGHT)).iter("{http://www.w3.org/2000/svg}rect"):
        title = shape.findtext("{http://www.w3.org/2000/svg}title")
        if re.match(r"rank \d", title or ""):
            boxes[title] = float(shape.get("height", 0))
    blocks = [(each.rank, block) for each in held for block in each.blocks]
    assert len(boxes) == len(blocks)
    largest = max((block.size, height) for (_, block), height in zip(blocks, boxes.values(), strict=True))
    for (rank, block), (title, height) in zip(blocks, boxes.items(), strict=True):
        assert title.startswith(f"rank {rank}, {block.kind}: {memory(block.size)}")
        assert height == pytest.approx(max(1.0, block.size * largest[1] / largest[0]), abs=0.02)


def sent_in(lines: list[Line]) -> int:
    return sum(bar.lane in {"weights", "gradients", "activations"} for line in lines for bar in line.bars)


@pytest.mark.parametrize("name", POSSIBLE)
def test_every_operation_is_in_the_picture_and_in_the_table(name):
    setup = split(name).setup
    rows = sent_rows(setup)
    planned = sum(traffic.payload_bytes for rank in setup.first_ranks for traffic in step_traffic(setup, rank=rank))
    assert sum(row["payload per step, bytes"] for row in rows) == planned
    lines = step_lines(setup)
    assert sent_in(lines) == sum(row["times"] for row in rows)
    titles = [title.text for title in ET.fromstring(step_svg(lines, DARK)).iter("{http://www.w3.org/2000/svg}title")]
    for row in rows:
        words = f"{row['operation']}, {memory(row['payload, bytes'])}, among {row['among']}: "
        assert any(title and title.startswith(words) for title in titles)


def test_what_offload_copies_is_in_the_picture_and_in_the_table():
    setup = split("ZeRO-3, NVMe", gpus=2).setup
    rows, (line,) = copied_rows(setup), step_lines(setup)
    assert {(row["what"], row["between"]) for row in rows} == {
        ("gradients", "from device to host"),
        ("gradients", "from host to device"),
        ("weights", "from host to device"),
        ("weights", "from files to host"),
        ("optimizer state", "from files to host"),
        ("optimizer state", "from host to files"),
    }
    assert sum(bar.lane in {"host", "files"} for bar in line.bars) == sum(row["times"] for row in rows)
    state = sum(row["bytes per step"] for row in rows if row["what"] == "optimizer state")
    held = model_state(setup)
    assert state == pytest.approx(2 * (held.optimizer + held.master), rel=1e-3)
    assert not copied_rows(split("ZeRO-3").setup)


def test_many_micro_batches_are_drawn_as_one_gap():
    setup = split("ZeRO-2", global_batch_size=64, micro_batch_size_per_gpu=1).setup
    (line,) = step_lines(setup)
    assert "+13" in [bar.label for bar in line.bars]
    assert [row["times"] for row in sent_rows(setup)] == [16, 1]


def test_the_drawn_pipeline_has_the_planned_bubble():
    """The passes of a stage take the share of the time that the planner's formula leaves them."""
    setup = split("Pipeline parallel", micro_batch_size_per_gpu=4).setup
    batches = setup.gradient_accumulation_steps
    lines = step_lines(setup)
    ends = [[bar.end for bar in line.bars if bar.label.startswith(("forward", "backward"))] for line in lines]
    busy, whole = 3.0 * batches, max(map(max, ends))
    assert 1 - busy / whole == pytest.approx(bubble_fraction(2, batches))
    told = dict(lessons(setup))["Pipeline parallel (1F1B)"]
    assert f"{bubble_fraction(2, batches):.0%}" in told


def test_zero_without_data_ranks_is_not_said_to_divide():
    assert "ZeRO-1 has nothing to divide" in dict(lessons(split("3D: pipeline and tensor").setup))
    assert "ZeRO-1: the optimizer state is a shard" in dict(lessons(split("3D: pipeline and tensor", gpus=8).setup))


def test_the_table_names_shares_and_places():
    rows = held_rows(holdings(split("ZeRO-3, offload").setup, ranks=4))
    assert {row["where"] for row in rows if row["kind"] == "master weights"} == {"host"}
    assert {round(row["share"], 2) for row in rows if row["kind"] == "master weights"} == {0.25}


def test_what_training_refuses_is_refused_in_its_words():
    with pytest.raises(UserError, match=r"autotp_size 2 does not divide the model's 25 heads"):
        split("Tensor parallel", model_size="xl")


def test_the_page_shows_the_planners_figures(tmp_path, monkeypatch):
    page = open_page("split", tmp_path, monkeypatch)
    expected = split("ZeRO-1", global_batch_size=None)
    shown = {metric.label: metric.value for metric in page.metric}
    assert page.markdown[0].value.startswith("**zero1** in bf16")
    assert shown["Peak memory of rank 0"] == memory(expected.peak.total)
    page.selectbox(key="split-strategy").set_value(CHOSEN["3D: pipeline and tensor"]).run()
    assert not page.exception
    assert page.markdown[0].value.replace("\\", "").startswith("**pipeline2-tensor2-zero1**")
    page.selectbox(key="split-model").set_value("xl").run()
    assert not page.exception
    assert "does not divide the model's 25 heads" in page.error[0].value.replace("\\", "")
