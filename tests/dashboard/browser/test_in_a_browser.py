"""The dashboard in a browser: every page, its use, its doors, its costs, and a run that it watches."""

import ast
import http.client
import json
import re
import signal
from typing import Any
from urllib.parse import urlencode

import pytest
from axe_playwright_python.sync_playwright import Axe
from dashboard_server import HOSTILE, PAGES, REPOSITORY, SECOND, Server, paused, settle
from measure import RECORD, costs
from playwright.sync_api import Locator, Page, expect

# Every page in both themes, at the width of a desk and of a phone, and by keyboard alone.


OF_STREAMLIT = {"list": "[data-testid=stSidebarNav]", "listitem": "[data-testid=stSidebarNav]"}
"""Rules of axe to the elements in which Streamlit breaks them itself.

Its navigation with headings puts a ``div`` between ``ul`` and ``li``. The program only names the pages.
"""
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}


FOREIGN = {
    "compare": ({"runs": ["first", HOSTILE]}, rf"equal loss: yes \({re.escape(HOSTILE)} against first"),
    "live": ({"watch": HOSTILE}, rf"^{re.escape(HOSTILE)} is finished"),
    "spikes": ({"run": HOSTILE}, "^0 of 0 steps stand out; 3 more cannot be judged"),
}
"""Queries for a run whose name is markup, and what the page says about it."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FOREIGN else pytest.mark.long, id=PAGES[name]) for name in PAGES]
)
def test_a_page_is_accessible_in_both_themes_fits_a_phone_and_shows_names_as_text(visit, name):
    query, sentence = FOREIGN.get(name, ({}, ""))
    page = visit(name, f"?{urlencode(query, doseq=True)}")
    main = page.get_by_test_id("stMain")
    if sentence:
        expect(main.get_by_text(re.compile(sentence)).last).to_be_visible()
    if name == "split":
        expect(page.get_by_role("img", name="What each of 4 ranks holds")).to_be_visible()
    assert main.locator("img[src=x], a[href*=evil], .katex").count() == 0
    assert page.evaluate("window.hit") is None
    for theme, colour in BACKGROUNDS.items():
        page.emulate_media(color_scheme=theme)
        expect(page.get_by_test_id("stApp")).to_have_css("background-color", colour)
        settle(page, PAGES[name])
        assert not violations(page), theme
    expect(page.locator("h1")).to_have_count(1)
    page.set_viewport_size({"width": 390, "height": 844})
    settle(page, PAGES[name])
    # Charts are drawn anew after the window has another size. A page that stays too wide ends in a time-out.
    page.wait_for_function("() => document.querySelector('[data-testid=stMain]').scrollWidth <= 390")


def violations(page: Page) -> list[str]:
    """What axe finds, among it a heading that skips a level, without ``OF_STREAMLIT``."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        f"{each['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for each in found
        for node in each["nodes"]
        if not _of_streamlit(page, each["id"], node)
    ]


def _of_streamlit(page: Page, rule: str, node: dict[str, Any]) -> bool:
    place = OF_STREAMLIT.get(rule)
    return place is not None and page.locator(node["target"][0]).first.evaluate(
        "(element, place) => element.closest(place) !== null", place
    )


def test_the_keyboard_reaches_navigation_and_controls_and_each_session_keeps_its_own_plan(visit):
    mine, theirs = visit(""), visit("plan")
    tab_to(mine, mine.get_by_role("link", name="Plan and cost", exact=True))
    mine.keyboard.press("Enter")
    settle(mine, "Plan and cost")
    devices = mine.get_by_role("slider", name="Devices")
    tab_to(mine, devices)
    mine.keyboard.press("ArrowRight")
    expect(devices).to_have_attribute("aria-valuetext", "16")
    expect(mine.get_by_test_id("stCode")).to_contain_text("--gpus 16")
    theirs.get_by_role("slider", name="Tokens of the training").press("ArrowLeft")
    expect(theirs.get_by_test_id("stCode")).to_contain_text("--tokens 3000000000")
    expect(theirs.get_by_test_id("stCode")).to_contain_text("--gpus 8")
    expect(mine.get_by_test_id("stCode")).to_contain_text("--tokens 10000000000")


def tab_to(page: Page, element: Any, *, most: int = 30) -> None:
    """Press Tab until ``element`` has the focus, and require that the focus can be seen."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if element.evaluate("element => element === document.activeElement"):
            break
    expect(element).to_be_focused()


# What people do on the pages: move sliders and generate text.


@pytest.mark.long
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


def choose(page: Page, label: str, option: str) -> None:
    page.get_by_role("combobox", name=label).click()
    page.get_by_role("option", name=option, exact=True).click()


# The live page follows a real training by itself, from the first step to the end.


STEPS, FIRST = 300, 10


def test_a_run_from_its_first_step_to_its_end(visit, folder, words):
    page = visit("live")
    expect(page.get_by_text("No run is training now.")).to_be_visible()
    often = {"steps_per_print": 1, "save_every": 0, "eval_every": 0}
    flags = words(checkpoint_path=folder / "watched", max_train_steps=STEPS, **often)
    with paused(flags, after=FIRST) as run:
        expect(page.get_by_text(f"watched is running: process {run.pid} holds its lock")).to_be_visible()
        expect(page.get_by_text(re.compile(rf"^step \d+ of {STEPS}, .* left$"))).to_be_visible()
        zoom(page)
        run.send_signal(signal.SIGCONT)
        run.communicate(timeout=120)
        assert run.returncode == 0
        expect(page.get_by_text("watched is finished")).to_be_visible()
        expect(page.get_by_text(f"step {STEPS} of {STEPS}")).to_be_visible()
        loss, throughput = page.get_by_test_id("stVegaLiteChart").all()[:2]
        expect(tick(throughput, f"{STEPS}")).to_be_visible()
        shown = [float(label) for label in loss.locator(".role-axis-label text").all_text_contents()]
        assert shown and max(shown) < FIRST  # steps and losses; without the zoom, steps go up to the last
        loss.dblclick()
        expect(tick(loss, f"{STEPS}")).to_be_visible()


def zoom(page: Page) -> None:
    """Show a part of the first picture: steps before ``FIRST``. A picture that was just drawn may miss the wheel."""
    picture = page.get_by_test_id("stVegaLiteChart").first
    labels, label = picture.locator(".role-axis-label text"), tick(picture, f"{FIRST}")
    expect(label).to_be_visible()
    for _ in range(10):
        picture.hover()
        page.keyboard.down("Control")
        page.mouse.wheel(0, -200)
        page.keyboard.up("Control")
        page.wait_for_timeout(1_000)  # while it is drawn anew, it has no labels
        if labels.count() and not label.count():
            return
    expect(label).to_have_count(0)


def tick(picture: Locator, label: str) -> Locator:
    return picture.locator(".role-axis-label text").get_by_text(label, exact=True)


# Which requests the dashboard's server answers, over HTTP and as websockets, and that it asks no other machine.


WEBSOCKET = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
WEBSOCKET["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="


def status(server: Server, path: str, headers: dict[str, str], *fields: tuple[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    for name, value in (*headers.items(), *fields):
        connection.putheader(name, value.replace("PORT", str(server.port)))
    connection.endheaders()
    found = connection.getresponse().status
    connection.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "origins", "allowed"),
    [
        *((["127.0.0.1:PORT"], [], True), (["127.0.0.1:PORT"], ["http://127.0.0.1:PORT"], True)),
        (["localhost:1234"], ["http://localhost:1234"], True),  # the other end of an SSH tunnel
        *((["[::1]:1234"], ["http://[::1]:1234"], True), (["lab.example"], ["https://lab.example"], True)),
        (["localhost:PORT"], ["http://localhost:1234"], False),  # another port's page
        *((["localhost:PORT"], [f"http://{name}:PORT"], False) for name in ("127.0.0.1", "LOCALHOST")),
        *((["127.0.0.1:PORT"], [origin], False) for origin in ("http://evil.example", "null")),
        (["127.0.0.1:PORT"], ["http://127.0.0.1:PORT", "http://evil.example"], False),
        (["evil.example:PORT"], [], False),  # a name that was made to resolve to 127.0.0.1
        (["evil.example:PORT"], ["http://evil.example:PORT"], False),
        *(([f"{host}evil.example"], [], False) for host in ("127.0.0.1.", "[::1]", "localhost:80@")),
        *((hosts, [], False) for hosts in (["10.0.0.7:PORT"], ["localhost", "evil.example"], [])),
    ],
)
def test_only_the_page_itself_is_answered(server, hosts, origins, allowed):
    fields = [("Host", host) for host in hosts] + [("Origin", origin) for origin in origins]
    refused = {400, 403}  # uvicorn itself refuses a field twice
    assert status(server, "/", {}, *fields) in ({200} if allowed else refused)
    assert status(server, "/_stcore/stream", WEBSOCKET, *fields) in ({101} if allowed else refused)


def test_the_server_asks_no_other_machine(server):
    for origin in ("http://evil.example", "http://localhost:1"):
        fields = [("Host", f"127.0.0.1:{server.port}"), ("Origin", origin)]
        assert status(server, "/_stcore/stream", WEBSOCKET, *fields) == 403
    noted = server.log.with_name("connections.txt").read_text().splitlines()
    asked = [each for each in map(ast.literal_eval, noted) if not isinstance(each, str)]
    assert not [each for each in asked if each[0] not in {"127.0.0.1", "::1"}]


def test_the_page_has_the_figures_of_the_record():
    page = (REPOSITORY / "docs" / "dashboard.md").read_text(encoding="utf-8")
    assert costs(json.loads(RECORD.read_text(encoding="utf-8"))) in page
