"""The campaign of cluster faults: what is drawn, a part of it, its blocks, and its page."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
from forked_ranks import launches_fork
from small_run import REPOSITORY

from dsgpt.benchmarks import clusters, clusters_runs
from dsgpt.benchmarks.clusters import KINDS, ClusterOptions, Clusters, Outcome, drawn
from dsgpt.benchmarks.frame import run_suite
from dsgpt.benchmarks.records import REFERENCE


def test_the_committed_record_is_of_the_seeded_campaign():
    record = json.loads((REPOSITORY / REFERENCE / "clusters.json").read_text())
    planned = {fault.index: fault.name for fault in clusters.campaign(clusters.FAULTS, seed=clusters.SEED)}
    assert {fault["index"]: fault["name"] for fault in record["faults"]} == planned
    assert [fault["name"] for fault in record["faults"] if fault["wrong"] or fault["not_run"]] == []
    guilty = [fault["named"] for fault in record["faults"] if fault["named"] is not None]
    assert sum(guilty) >= clusters.NAMED * len(guilty)
    assert {fault["kind"] for fault in record["faults"]} == KINDS.keys()


PARTS = [
    [
        ("link cut", "", "ddp", "ranks", True),
        ("NaN", "loss", "tensor2-zero1", "ranks", True),
        ("preemption", "spot notice", "fsdp", "torchrun 1:2", None),
    ],
    [("NaN", "", "pipeline2-zero1", "ranks", True), ("packets lost", "", "zero3", "ranks", None)],
]
"""Of faults that strike at once the kind, how, strategy and launcher, and whether the culprit is named.

For the preempted run, torchrun's agents start the ranks again.
"""


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS, ids=["core", "more"])
def test_a_part_of_the_campaign(tmp_path, part):
    faults = [
        replace(drawn([*KINDS].index(kind), seed=1), how=how, strategy=strategy, launcher=launcher)
        for kind, how, strategy, launcher, _ in part
    ]
    with launches_fork():
        runs = clusters_runs.ClusterRuns(tmp_path, repository=REPOSITORY)
    with ThreadPoolExecutor(len(part)) as pool, runs:
        outcomes = list(pool.map(runs.attempt, faults))
    if reasons := {outcome.not_run for outcome in outcomes} - {""}:
        pytest.skip("; ".join(reasons))
    assert [outcome.wrong for outcome in outcomes] == [""] * len(part)
    assert [outcome.named for outcome in outcomes] == [named for *_, named in part]
    assert [outcome.steps_lost > 0 for outcome in outcomes if outcome.named is None] == [False]
    if part is PARTS[0]:
        assert outcomes[0].steps_lost > 0


def test_a_campaign_continues_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    class Runs(nullcontext):
        def __init__(self, _folder, *, repository):
            super().__init__(self)
            assert repository == REPOSITORY

        def attempt(self, fault):
            asked.append(fault.index)
            time.sleep(0.1 * (fault.index + 1) * (asked[0] is None))
            if fault.index == 2 and len(asked) == 3:
                raise KeyboardInterrupt
            return Outcome(wrong="a weight differs by 1" if fault.index == 1 else "", named=fault.index != 3)

    asked: list[int | None] = []
    monkeypatch.setattr(clusters_runs, "ClusterRuns", Runs)
    options = ClusterOptions(faults=3, at_once=1, output=tmp_path / "clusters.json")
    with pytest.raises(KeyboardInterrupt):
        run_suite(Clusters, options, repository=REPOSITORY)
    assert run_suite(Clusters, options, repository=REPOSITORY) == 1
    assert asked == [0, 1, 2, 2, 3, 4]
    record = json.loads(options.output.read_text())
    assert [fault["index"] for fault in record["faults"]] == [0, 1, 2, 3, 4]
    assert [block["faults"] for block in record["blocks"]] == [2, 3]
    page = options.output.with_suffix(".md").read_text()
    assert f"* {record['faults'][1]['name']}: a weight differs by 1" in page
    assert "named in **4 of 5**" in page
    assert run_suite(Clusters, replace(options, again=True, minutes=0.0), repository=REPOSITORY) == 1
    assert len(json.loads(options.output.read_text())["faults"]) == 4
    asked[:] = [None]  # two faults are still running when the first one and the time are over
    late = replace(options, at_once=3, minutes=0.001, output=tmp_path / "late.json")
    assert run_suite(Clusters, late, repository=REPOSITORY) == 1
    assert [fault["index"] for fault in json.loads(late.output.read_text())["faults"]] == [0, 1, 2]
