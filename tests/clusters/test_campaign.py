"""The campaign of cluster faults: what is drawn, a part of it, its blocks, and its page."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import pytest
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


CORE = [
    ("link cut", "ddp", "ranks"),
    ("NaN", "tensor2-zero1", "ranks"),
    ("NaN", "pipeline2-zero1", "ranks"),
    ("packets lost", "zero3", "ranks"),
    ("preemption", "fsdp", "torchrun 1:2"),
]
"""Kind, strategy and launcher."""


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """Faults of four kinds at once, for one of which torchrun's agents start the ranks again; and their outcomes."""
    faults = [
        replace(drawn([*KINDS].index(kind), seed=1), strategy=strategy, launcher=launcher)
        for kind, strategy, launcher in CORE
    ]
    faults[1], faults[4] = replace(faults[1], how="loss"), replace(faults[4], how="spot notice")
    runs = clusters_runs.ClusterRuns(tmp_path_factory.mktemp("campaign"), repository=REPOSITORY)
    with ThreadPoolExecutor(5) as pool, runs:
        return runs, list(pool.map(runs.attempt, faults))


def test_a_part_of_the_campaign(part):
    _, outcomes = part
    if reasons := {outcome.not_run for outcome in outcomes} - {""}:
        pytest.skip("; ".join(reasons))
    assert [outcome.wrong for outcome in outcomes] == [""] * 5
    assert [outcome.named for outcome in outcomes] == [True, True, True, None, None]
    assert outcomes[0].steps_lost > 0
    assert outcomes[4].steps_lost == 0


def test_a_campaign_continues_where_it_was_interrupted(tmp_path, monkeypatch, capsys):
    class Runs(nullcontext):
        def __init__(self, _folder, *, repository):
            super().__init__(self)
            assert repository == REPOSITORY

        def attempt(self, fault):
            asked.append(fault.index)
            if fault.index == 2 and len(asked) == 3:
                raise KeyboardInterrupt
            return Outcome(wrong="a weight differs by 1" if fault.index == 1 else "", named=fault.index != 3)

    asked: list[int] = []
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
