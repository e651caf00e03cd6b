"""``make screenshots``: pages in both themes, of the committed records and of a training that runs now."""

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from dashboard_server import PAGES, REPOSITORY, Server, launch_browser, paused, serving, settle
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from dsgpt.benchmarks.cells import prepare_corpus
from dsgpt.common.command_line import run_script

INTO = REPOSITORY / "docs" / "images" / "dashboard"
HEIGHTS = {"": 620, "compare": 1500, "live": 1120, "spikes": 900, "split": 1340, "plan": 1300, "generate": 1120}
"""Pixels of each page with a picture; what lies below is left out."""
ON_A_PHONE = {"": "light", "live": "dark"}
REFERENCE = "reference/cpu-2-cores"
QUERIES = {"compare": {"runs": [f"{REFERENCE}/demo-baseline", f"{REFERENCE}/demo-zero1"]}}
QUERIES["spikes"] = {"run": [f"{REFERENCE}/demo-baseline"]}
STEPS, SHOWN_AT, SAVE_EVERY = 400, 250, 100
PATIENCE_MS = 60_000


def main() -> None:
    """Make all pictures anew.

    Raises:
        UserError: Chromium is not installed.
    """
    INTO.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=PATIENCE_MS)
    pictures = [(name, theme, theme, 1280, HEIGHTS[name]) for name in HEIGHTS for theme in ("light", "dark")]
    pictures += [(name, "phone", theme, 390, 844) for name, theme in ON_A_PHONE.items()]
    with tempfile.TemporaryDirectory() as folder, _runs(Path(folder)) as server, sync_playwright() as playwright:
        browser = launch_browser(playwright)
        for name, kind, theme, width, height in pictures:
            size = {"width": width, "height": height}
            with browser.new_context(viewport=size, color_scheme=theme) as context:
                picture = _picture(context.new_page(), server, name)
            image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
            path = INTO / f"{name or 'overview'}-{kind}.png"
            image.save(path, optimize=True)
            print(f"{path.relative_to(REPOSITORY)}: {path.stat().st_size / 1000:.0f} kB")
        browser.close()


@contextmanager
def _runs(folder: Path) -> Iterator[Server]:
    """A dashboard of the committed records, and of a training that waits after ``SHOWN_AT`` steps."""
    runs = folder / "checkpoint"
    shutil.copytree(REPOSITORY / "checkpoint" / "reference", runs / "reference")
    corpus = prepare_corpus(REPOSITORY, folder / "corpus")
    recipe = REPOSITORY / "ds_configs" / "sizes" / "demo.json"
    words = f"--run_type baseline --device cpu --steps_per_print 1 --max_train_steps {STEPS} --save_every {SAVE_EVERY}"
    words += " --eval_every 50 --max_val_steps 4 --num_layers 2 --num_heads 4 --embedding_size 128"
    words += f" --max_position_embeddings 128 --deepspeed_config {recipe} --checkpoint_path {runs / 'mine'}"
    words += f" --train_data_path {corpus.train} --val_data_path {corpus.val}"
    os.chdir(folder)  # the page shows the folder as it was given
    with paused(words.split(), after=SHOWN_AT), serving(Path("checkpoint"), log=folder / "log.txt") as server:
        server.wait()
        yield server


def _picture(page: Page, server: Server, name: str) -> bytes:
    """The page, when two pictures of it are the same."""
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{server.url}/{name}?{urlencode(QUERIES.get(name, {}), doseq=True)}")
    settle(page, PAGES[name])
    if name == "generate":
        page.get_by_role("combobox", name="Beside it").click()
        page.get_by_role("option", name=f"mine/step-{SAVE_EVERY:08}", exact=True).click()
        page.get_by_role("button", name="Generate").click()
        expect(page.get_by_test_id("stVegaLiteChart")).to_have_count(2)
    before, picture = b"", page.screenshot()
    while picture != before:
        page.wait_for_timeout(500)
        before, picture = picture, page.screenshot()
    return picture


if __name__ == "__main__":
    run_script(main)
