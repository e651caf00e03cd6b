"""What people do on the pages: move sliders, generate text, and look at names and prompts that others wrote."""

import re
from urllib.parse import urlencode

import pytest
from dashboard_server import HOSTILE, SECOND
from playwright.sync_api import FloatRect, Locator, Page, expect
from test_every_page import violations


def test_two_sessions_move_sliders_and_keep_their_own_plan(visit):
    mine, theirs = visit("plan"), visit("plan")
    mine.get_by_role("slider", name="Devices").press("ArrowRight")
    expect(mine.get_by_test_id("stCode")).to_contain_text("--gpus 16")
    theirs.get_by_role("slider", name="Tokens of the training").press("ArrowLeft")
    expect(theirs.get_by_test_id("stCode")).to_contain_text("--tokens 3000000000")
    expect(theirs.get_by_test_id("stCode")).to_contain_text("--gpus 8")
    expect(mine.get_by_test_id("stCode")).to_contain_text("--tokens 10000000000")


def test_a_slider_splits_the_model_over_more_ranks(visit):
    page = visit("split")
    expect(page.get_by_role("img", name="What each of 4 ranks holds")).to_be_visible()
    page.get_by_role("slider", name="Ranks").press("ArrowRight")
    expect(page.get_by_role("img", name="What each of 8 ranks holds")).to_be_visible()


def test_two_checkpoints_continue_a_prompt_with_one_seed(visit):
    page = visit("generate")
    prompt = "<b>def</b> **main**("
    choose(page, "Checkpoint", "first/step-00000003")
    choose(page, "Beside it", f"{SECOND}/step-00000003")
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.get_by_label("New tokens").fill("8")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_text(re.compile(r"^8 tokens in .* tokens/s"))).to_have_count(2)
    one, two = page.get_by_test_id("stCode").all_inner_texts()
    assert one == two and one.startswith(prompt) and len(one) > len(prompt)
    expect(page.get_by_test_id("stVegaLiteChart")).to_have_count(2)
    assert not violations(page)
    beginnings = [[box["y"] for box in boxes(column)] for column in page.get_by_test_id("stColumn").all()[-2:]]
    assert beginnings[0] == beginnings[1] and len(beginnings[0]) == 4


def boxes(column: Locator) -> list[FloatRect]:
    """Of what a column shows: the name, the text, the heading of the likeliest tokens and their picture."""
    shown = column.locator("h2, h3, [data-testid=stCode], [data-testid=stVegaLiteChart]").all()
    return [box for each in shown if (box := each.bounding_box()) is not None]


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_role("combobox", name=label).click()
    page.get_by_role("option", name=option, exact=True).click()


@pytest.mark.parametrize(
    ("name", "query", "sentence"),
    [
        ("compare", {"runs": ["first", HOSTILE]}, rf"equal loss: yes \({re.escape(HOSTILE)} against first"),
        ("live", {"watch": HOSTILE}, rf"^{re.escape(HOSTILE)} is finished"),
    ],
)
def test_the_name_of_a_run_is_shown_as_text(visit, name, query, sentence):
    page = visit(name, f"?{urlencode(query, doseq=True)}")
    main = page.get_by_test_id("stMain")
    expect(main.get_by_text(re.compile(sentence)).last).to_be_visible()
    assert main.locator("img[src=x], a[href*=evil], .katex").count() == 0
    assert page.evaluate("window.hit") is None
