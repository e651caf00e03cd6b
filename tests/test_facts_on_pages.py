"""The README has the figures of the committed records; pages that list keys, codes or versions list all of them.

``tests/test_pages.py`` checks the commands and links of all pages.
"""

import json
import os
import re
import shlex
import subprocess
from dataclasses import fields
from fnmatch import fnmatch

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY
from training_runs import read_lines

from dsgpt.benchmarks.gpu import readme_sentence
from dsgpt.benchmarks.records import RECORDS, show_words
from dsgpt.checkpoints.manifest import Segment
from dsgpt.common import errors
from dsgpt.telemetry.monitor import GpuSample

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
IMAGES = REPOSITORY / "docs" / "images"
COMPARISON = (IMAGES / "comparison.md").read_text(encoding="utf-8")
"""``tests/goldens/test_golden_records.py`` holds it to the records."""


def test_make_charts_draws_what_remaking_the_records_draws():
    words = ["make", "--dry-run", "--no-print-directory", "--old-file", ".venv/bin/.installed", "charts"]
    found = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=REPOSITORY, env=found, check=True, capture_output=True, text=True)
    pages, everything = (shlex.split(line)[1:] for line in done.stdout.splitlines())
    assert sorted(show_words(RECORDS["demo"], REPOSITORY)) == sorted(pages)
    assert everything[everything.index("--output-dir") + 1] == "charts/reference" and "--only" not in everything


def test_every_result_is_a_row_of_the_comparison():
    results = README.split("## Try it", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in results.splitlines() if line.startswith("|") and "---" not in line][1:]
    assert len(rows) >= 6
    for row in rows:
        assert row in COMPARISON.splitlines()
    assert "same work: yes" in COMPARISON and "The work is the same." in results
    assert re.search(r"^machine: (.*?)\.", COMPARISON, flags=re.MULTILINE).group(1) in results


def test_the_plan_is_what_its_command_prints(tmp_path):
    command, shown = re.search(
        r"```bash\n(.*plan\.py.*)\n```.*?```text\n(.*?)```", README.split("## Plan", 1)[1], flags=re.DOTALL
    ).groups()
    _, script, *words = shlex.split(command)
    done = run_script(REPOSITORY / script, [*words, "--into", tmp_path], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) >= 8
    assert [line for line in lines if line not in done.stdout.splitlines()] == []


def test_the_sweep_is_that_of_its_page():
    """``tests/benchmarks/test_sweeps.py`` holds the page to the record."""
    page = (REPOSITORY / "docs" / "sweep-strategies.md").read_text(encoding="utf-8")
    compared = README.split("## Compare", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in compared.splitlines() if line.startswith("|") and "---" not in line]
    assert len(rows) >= 5
    assert [row for row in rows if row not in page.splitlines()] == []
    words = re.search(r"benchmark\.py run (.*)", compared).group(1).split()
    assert words[words.index("--repeats") + 1] in re.search(r"trained (\d+) times", page).group(1)


def test_the_sentence_about_gpus_is_that_of_the_committed_record():
    """Without one it is that no GPU has run the code; one of a stand-in is refused."""
    files = sorted((REPOSITORY / "checkpoint" / "reference").glob("*/gpu.json"))
    sentence = readme_sentence(json.loads(files[-1].read_text(encoding="utf-8")) if files else None)
    assert sentence in " ".join(README.split())


# Pages that list keys, exit codes or versions.


def test_the_newest_version_of_the_changelog_is_the_packages():
    changelog, project = ((REPOSITORY / name).read_text() for name in ("CHANGELOG.md", "pyproject.toml"))
    newest = re.search(r"^## \[(.*?)\] - \d{4}-\d\d-\d\d$", changelog, flags=re.MULTILINE)
    assert f'\nversion = "{newest[1]}"\n' in project


DEMO = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "demo-zero1"
RECORDS_PAGE = (REPOSITORY / "docs" / "records.md").read_text(encoding="utf-8")


def keys_behind(words: str) -> list[str]:
    """What the first column of the first table at or behind ``words`` has between backticks."""
    part = RECORDS_PAGE[RECORDS_PAGE.index(words) :]
    rows = re.search(r"(?:^\|.*\n)+", part, flags=re.MULTILINE).group(0).splitlines()[2:]
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_keys_of_steps():
    (steps,) = {tuple(line.keys() - {"interval"}) for line in read_lines(DEMO)}
    (validations,) = {tuple(line) for line in read_lines(DEMO, "val_loss")}
    assert sorted(keys_behind("\n## Steps")) == sorted(steps)
    assert f"A validation's line has {', '.join(f'`{key}`' for key in validations[:-1])} and `{validations[-1]}`." in (
        RECORDS_PAGE.replace("\n", " ")
    )


def test_the_keys_of_intervals_and_samples():
    assert sorted(keys_behind("| keys of `interval` |")) == sorted(
        {"mfu", *(key for line in read_lines(DEMO, "interval") for key in line["interval"])}
    )
    assert keys_behind("\n## GPUs") == ["uuid", *GpuSample.__dataclass_fields__]


def test_the_keys_of_segments():
    known = {field.name for field in fields(Segment)}
    listed = keys_behind("\n## Segments")
    assert all(any(fnmatch(key, pattern) for pattern in listed) for key in known)
    assert all(any(fnmatch(key, pattern) for key in known) for pattern in listed)


def test_the_exit_codes():
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)} == codes | {1}


@pytest.mark.parametrize("page", ["aws", "google-cloud"])
def test_prices_of_the_pages_about_clouds_are_those_of_the_planner(page):
    listed = json.loads((REPOSITORY / "src" / "dsgpt" / "planner" / "prices.json").read_text())["prices"]
    prices = {(price["provider"], price["instance"]): price for price in listed}
    provider = "AWS" if page == "aws" else "Google Cloud"
    text = (REPOSITORY / "launch" / f"{page}.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.search(r"\| \d{4}-\d\d-\d\d \|", line)]
    assert len(rows) >= 5
    for instance, gpus, *rest in rows:
        price = prices[provider, instance]
        money = [price["on_demand_usd_per_hour"], *([price["spot_usd_per_hour"]] if page == "google-cloud" else [])]
        shown = ["not known" if dollars is None else f"{dollars:.2f}" for dollars in money]
        network = "not known" if price["network_gbps"] is None else f"{price['network_gbps']:,} Gbit/s"
        assert [int(gpus.split()[0]), *rest] == [price["gpus"], *shown, price["known_on"], network], instance
