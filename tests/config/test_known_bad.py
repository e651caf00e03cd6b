"""Releases of DeepSpeed that train wrong are refused where they do, unless the user insists. Versions are pretended."""

import json
import re
from importlib.metadata import PackageNotFoundError
from unittest.mock import Mock

import pytest
from requests_here import resolved
from small_run import RECIPE, REPOSITORY, command_line, write_recipe
from test_compatibility import asked

from dsgpt.common.errors import UserError
from dsgpt.config import compatibility as known_bad
from dsgpt.config.compatibility import ALLOW, KNOWN_BAD, TESTED, KnownBad
from dsgpt.machine import device
from dsgpt.training.command import train

SPLIT = {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 1}}


def stage(number: int, **more: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": number, **more}}


@pytest.mark.parametrize(
    ("release", "recipe", "flags", "thread"),
    [
        ("0.17.6", stage(2), {}, "issues/7718"),
        ("0.18.2.post1", stage(2), {}, "issues/7718"),
        ("0.17.5", stage(2), {}, None),
        ("0.18.3", stage(2), {}, None),
        ("0.18.2", SPLIT, {"grad_accum_steps": 2}, "issues/7773"),
        ("0.18.2", SPLIT, {"grad_accum_steps": 1}, None),
        ("0.18.5", stage(0), {"precision": "bf16"}, "issues/7837"),
        ("0.18.5", stage(0), {"precision": "fp32"}, None),
        ("0.18.6", stage(0), {"precision": "bf16"}, None),
        ("0.18.6", stage(1), {"precision": "bf16"}, "pull/7985"),
        ("0.18.6", stage(1), {"precision": "bf16", "ranks": 1}, None),
        ("0.19.0", stage(1), {"precision": "bf16"}, None),
        ("0.18.4", stage(2, overlap_comm=True), {"device": "cuda", "precision": "fp32"}, "pull/7965"),
        ("0.18.4", stage(2), {"device": "cuda", "precision": "fp32"}, None),
        ("0.18.9", stage(2), {}, "no thread"),
        ("0.18.9", stage(3), {}, None),
        ("0.18.2", stage(2), {"run_type": "ddp"}, None),
        (TESTED, stage(2), {"precision": "bf16"}, None),
    ],
)
def test_what_a_release_trains_wrong_is_refused(tmp_path, monkeypatch, release, recipe, flags, thread):
    monkeypatch.setattr(known_bad, "version", lambda _: release)
    monkeypatch.setattr(device, "cuda_devices", lambda: 2 if flags.get("device") == "cuda" else 0)
    flags = {"ranks": 2, **flags}
    if thread is None:
        notices = asked(tmp_path, recipe=recipe, **flags).notices
        untested = release != TESTED and flags.get("run_type") != "ddp"
        assert sum(f"DeepSpeed {release} is installed" in line for line in notices) == untested
        return
    with pytest.raises(UserError) as caught:
        asked(tmp_path, recipe=recipe, **flags)
    (line,) = caught.value.problems
    assert f"recipe.json: DeepSpeed {release} cannot train this: " in line
    assert f"(DeepSpeed's {thread}): install {TESTED}" in line


def test_a_machine_without_deepspeed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(known_bad, "version", Mock(side_effect=PackageNotFoundError("deepspeed")))
    with pytest.raises(UserError, match=f"^--run_type optimized needs DeepSpeed: install it .*=={TESTED}"):
        asked(tmp_path, recipe=stage(2), ranks=2)


def test_a_dry_run_is_refused_and_the_user_may_insist_which_is_recorded(here, monkeypatch, capsys):
    monkeypatch.setattr(known_bad, "version", lambda _: "0.18.5")
    write_recipe(here / "recipe.json", RECIPE, **stage(0))
    words = command_line(here, run_type="optimized", precision="bf16", max_train_steps=1, no_inference=True)
    assert train([*words, "--dry_run"]) == 2
    assert f"set {ALLOW}=1 to train all the same" in capsys.readouterr().err
    monkeypatch.setenv(ALLOW, "1")
    assert resolved(here, run_type="optimized", precision="bf16").allowed_faults == ("issues/7837",)
    assert train(words) == 0
    assert f"{ALLOW}=1 lets DeepSpeed 0.18.5 train, though gradients are divided" in capsys.readouterr().out
    record = json.loads((here / "run" / "training_metrics.json").read_text())
    assert record["env"]["allowed_faults"] == "issues/7837"


def test_the_page_shows_the_table_and_the_pin():
    page = (REPOSITORY / "docs" / "training.md").read_text()
    assert "|---|---|---|---|---|---|\n" + "".join(map(row, KNOWN_BAD)) in page
    pinned = re.search(r"^deepspeed==(.*)$", (REPOSITORY / "requirements.txt").read_text(), flags=re.MULTILINE)
    assert pinned and pinned.group(1) == TESTED


def row(known: KnownBad) -> str:
    """A fault as the page has it."""
    stages = "any" if len(known.stages) == 4 else ", ".join(map(str, known.stages))
    thread = known.thread
    if thread != "no thread":
        thread = f"[{thread}](https://github.com/deepspeedai/DeepSpeed/{thread})"
    return f"| `{known.releases}` | {stages} | {known.precision} | {known.needs} | {thread} | {known.effect} |\n"
