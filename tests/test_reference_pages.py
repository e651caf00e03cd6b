"""Pages that list keys of steps or segments, exit codes or versions list all of them."""

import json
import re
import tomllib
from dataclasses import fields
from fnmatch import fnmatch

from small_run import REPOSITORY

from dsgpt.benchmarks.plan import MOMENTS
from dsgpt.checkpoints.manifest import Segment
from dsgpt.common import errors
from dsgpt.planner.memory import PARTS
from dsgpt.telemetry.meter import IntervalFigures
from dsgpt.telemetry.monitor import GpuSample

RECORDS = (REPOSITORY / "docs" / "records.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def keys_of_the_table(title: str) -> list[str]:
    """What the first column of the first table under ``title`` has between backticks."""
    part = RECORDS.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]
    rows = re.search(r"(?:^\|.*\n)+", part, flags=re.MULTILINE).group(0).splitlines()[2:]
    return [key for row in rows for key in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_the_keys_of_steps():
    run = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores" / "demo-zero1"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (steps,) = {tuple(line.keys() - {"interval"}) for line in lines if "loss" in line}
    (validations,) = {tuple(line) for line in lines if "val_loss" in line}
    assert sorted(keys_of_the_table("Steps")) == sorted(steps)
    assert f"A validation's line has {', '.join(f'`{key}`' for key in validations[:-1])} and `{validations[-1]}`." in (
        RECORDS.replace("\n", " ")
    )


def test_the_keys_of_intervals():
    table = RECORDS.split("| keys of `interval` |", 1)[1].split("\n\n", 1)[0]
    listed = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert sorted(listed) == sorted({*IntervalFigures.__annotations__, "mfu"})


def test_the_keys_of_samples():
    assert keys_of_the_table("GPUs") == ["uuid", *GpuSample.__dataclass_fields__]


def test_the_keys_of_segments():
    known = {field.name for field in fields(Segment)}
    listed = keys_of_the_table("Segments")
    assert all(any(fnmatch(key, pattern) for pattern in listed) for key in known)
    assert all(any(fnmatch(key, pattern) for key in known) for pattern in listed)


def test_the_parts_of_a_predicted_peak():
    table = RECORDS.split("| part | contents |", 1)[1].split("\n\n", 1)[0]
    listed = re.findall(r"`([^`]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert sorted(listed) == sorted(PARTS)
    moments = RECORDS.split("`moment` is the part of the step", 1)[1].split("`parts`", 1)[0]
    assert set(MOMENTS) == set(re.findall(r"`([^`]+)`", moments))


def test_the_exit_codes():
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)} == codes | {1}


def test_the_newest_version_of_the_changelog_is_the_packages():
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.*?)\] - \d{4}-\d\d-\d\d$", text, flags=re.MULTILINE)[0] == PROJECT["version"]


def test_the_hosted_workflow_runs_ci_with_every_version_that_works():
    text = (REPOSITORY / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"^ +- run: (.*)$", text, flags=re.MULTILINE) == [".ci/run"]
    versions = re.findall(r"^ +(3\.\d+)$", text, flags=re.MULTILINE)
    assert versions == ["3.13", "3.12", "3.11"]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
