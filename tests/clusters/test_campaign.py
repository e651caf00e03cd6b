"""The campaign of cluster faults: what is drawn, a part of it, its blocks, and its page."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks import clusters, clusters_runs
from dsgpt.benchmarks.clusters import KINDS, drawn
from dsgpt.benchmarks.records import REFERENCE


def test_the_committed_record_holds_the_seeded_campaign():
    record = json.loads((REPOSITORY / REFERENCE / "clusters.json").read_text())
    planned = clusters.campaign(clusters.FAULTS, seed=clusters.SEED)
    assert [fault["name"] for fault in record["faults"]] == [fault.name for fault in planned]
    assert [fault["name"] for fault in record["faults"] if fault["wrong"] or fault["not_run"]] == []
    guilty = [fault["named"] for fault in record["faults"] if fault["named"] is not None]
    assert sum(guilty) >= clusters.NAMED * len(guilty) > 100
    for key, values in {"strategy": clusters.RUNS, "launcher": clusters.LAUNCHERS}.items():
        assert {fault[key] for fault in record["faults"]} == set(values)


CORE = {"link cut": "ddp", "NaN": "zero1", "packets lost": "zero3", "preemption": "fsdp"}


def test_a_part_of_the_campaign(tmp_path):
    """Runs of the four kinds at once, for one of which torchrun's agents start the ranks again."""
    indexes = [list(KINDS).index(kind) for kind in CORE]
    faults = [
        replace(drawn(index, seed=1), strategy=strategy, launcher="torchrun 1:2" if strategy == "fsdp" else "ranks")
        for index, strategy in zip(indexes, CORE.values(), strict=True)
    ]
    runs = clusters_runs.ClusterRuns(tmp_path, repository=REPOSITORY)
    with ThreadPoolExecutor(4) as pool, runs:
        outcomes = list(pool.map(runs.attempt, faults))
    if reasons := {outcome.not_run for outcome in outcomes} - {""}:
        pytest.skip("; ".join(reasons))
    assert [outcome.wrong for outcome in outcomes] == [""] * 4
    assert [outcome.named for outcome in outcomes] == [True, True, None, None]
    assert outcomes[0].steps_lost > 0
    assert outcomes[3].steps_lost == 0
