"""The live page follows real trainings by itself, from the first step to the end, or to a kill."""

import re
import signal
from contextlib import suppress
from pathlib import Path

from paused_training import paused
from playwright.sync_api import Locator, Page, TimeoutError, expect

STEPS, FIRST = 300, 10


def test_a_run_from_its_first_step_to_its_end(visit, folder, words):
    page = visit("live")
    expect(page.get_by_text("No run is training now.")).to_be_visible()
    with paused(flags(words, folder / "watched"), after=FIRST) as run:
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


def test_a_run_that_is_killed(visit, folder, words):
    page = visit("live")
    with paused(flags(words, folder / "killed"), after=FIRST) as run:
        expect(page.get_by_text(f"killed is running: process {run.pid} holds its lock")).to_be_visible()
        run.kill()
        run.wait()
        expect(page.get_by_text("killed is abandoned: no process holds its lock")).to_be_visible()


def zoom(page: Page) -> None:
    """Show a part of the first picture: steps before ``FIRST``. A picture that was just drawn may miss the wheel."""
    picture = page.get_by_test_id("stVegaLiteChart").first
    label = tick(picture, f"{FIRST}")
    expect(label).to_be_visible()
    for _ in range(10):
        picture.hover()
        page.keyboard.down("Control")
        page.mouse.wheel(0, -200)
        page.keyboard.up("Control")
        with suppress(TimeoutError):
            label.wait_for(state="detached", timeout=2_000)
            return
    expect(label).to_have_count(0)


def tick(picture: Locator, label: str) -> Locator:
    return picture.locator(".role-axis-label text").get_by_text(label, exact=True)


def flags(words, run_dir: Path) -> list[str]:
    return words(checkpoint_path=run_dir, max_train_steps=STEPS, steps_per_print=1, save_every=0, eval_every=0)
