"""Every page in both themes, at the width of a desk and of a phone, and by keyboard alone."""

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from dashboard_server import PAGES, settle
from playwright.sync_api import Page, expect

OF_STREAMLIT = {"list": "[data-testid=stSidebarNav]", "listitem": "[data-testid=stSidebarNav]"}
"""Rules of axe to the elements in which Streamlit breaks them itself.

Its navigation with headings puts a ``div`` between ``ul`` and ``li``. The program only names the pages.
"""
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}


@pytest.mark.parametrize("name", PAGES, ids=PAGES.values())
def test_a_page_is_accessible_in_both_themes_and_fits_a_phone(visit, name):
    page = visit(name)
    for theme, colour in BACKGROUNDS.items():
        page.emulate_media(color_scheme=theme)
        expect(page.get_by_test_id("stApp")).to_have_css("background-color", colour)
        settle(page, PAGES[name])
        assert not violations(page), theme
    expect(page.locator("h1")).to_have_count(1)
    page.set_viewport_size({"width": 390, "height": 844})
    settle(page, PAGES[name])
    page.wait_for_function("() => document.querySelector('[data-testid=stMain]').clientWidth <= 390")
    assert page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollWidth") <= 390


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


def test_the_keyboard_reaches_navigation_and_controls(visit):
    page = visit("")
    tab_to(page, page.get_by_role("link", name="Plan and cost", exact=True))
    page.keyboard.press("Enter")
    settle(page, "Plan and cost")
    devices = page.get_by_role("slider", name="Devices")
    tab_to(page, devices)
    page.keyboard.press("ArrowRight")
    expect(devices).to_have_attribute("aria-valuetext", "16")
    expect(page.get_by_test_id("stCode")).to_contain_text("--gpus 16")


def tab_to(page: Page, element: Any, *, most: int = 30) -> None:
    """Press Tab until ``element`` has the focus, and require that the focus can be seen."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if element.evaluate("element => element === document.activeElement"):
            break
    expect(element).to_be_focused()
