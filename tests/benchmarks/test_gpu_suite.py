"""``python src/benchmark.py gpu``: its chunks, what a second call runs again, its page, and a rehearsal of it."""

import json
import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, within
from stand_in_chunks import started_chunks

from dsgpt.benchmarks import gpu, plan
from dsgpt.benchmarks.frame import Record, run_suite
from dsgpt.benchmarks.gpu import CHUNKS, PASSED, Chunk, Gpu, GpuOptions, gpu_page, readme_sentence
from dsgpt.benchmarks.gpu_chunks import Proof
from dsgpt.benchmarks.sweep_cells import SweepPlan
from dsgpt.common.errors import UserError

COMMAND = REPOSITORY / "src" / "benchmark.py"
HARDWARE = {"gpu_name": "a GPU", "gpu_count_visible": 1, "device": "cuda", "cpu_name": None, "gpu_memory_bytes": 1}
HEAD = {"env": {"python_version": "3", "torch_version": "2", "deepspeed_version": "0"}, "hardware": HARDWARE}


def chunk(name: str, **changes: Any) -> Chunk:
    return replace(Chunk(f"stand_in_chunks:{name}", 1, 1), **changes)


class Proofs:
    """Runs the command in this process, with stand-ins for the machine and the chunks."""

    def __init__(self, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.into, self._patch = into, monkeypatch
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

    def run(self, chunks: dict[str, Chunk], **options: Any) -> tuple[int, Record]:
        self._patch.setattr(gpu, "CHUNKS", chunks)
        self._patch.setattr(Gpu, "_machine", lambda _: HEAD)
        code = run_suite(Gpu, GpuOptions(into=self.into, **options), repository=REPOSITORY)
        return code, self.result("gpu")

    def result(self, name: str) -> Record:
        return json.loads((self.into / f"{name}.json").read_text())

    @property
    def started(self) -> list[str]:
        """The chunks that were started since the last look."""
        names = started_chunks(self.into / "work")
        (self.into / "work" / "starts.txt").unlink(missing_ok=True)
        return names


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proofs:
    return Proofs(tmp_path / "into", monkeypatch)


THREE = {"one": chunk("passes"), "two": chunk("fails"), "three": chunk("passes")}


def test_a_failed_verdict_does_not_stop_the_others_and_nothing_runs_twice_but_what_is_damaged(proofs, capsys):
    code, record = proofs.run(THREE)
    assert code == 1
    assert proofs.started == ["one", "two", "three"]
    assert [each["chunk"] for each in record["chunks"]] == [*THREE]
    assert [each["verdict"] for each in record["chunks"]] == ["passed", "failed", "passed"]
    assert "FAILED: two: a loss is off by 1.0e+00\n" in capsys.readouterr().out
    made = proofs.result("two")
    expected = {"status": "done", "verdict": "failed", "limit": "No loss is off.", "gpu_name": "a GPU"}
    assert made.items() >= expected.items()
    assert {"seconds", "git_commit", "sources_sha256", "env", "figures", "stand_in"} < made.keys()
    code, again = proofs.run(THREE)
    assert (code, again["chunks"]) == (1, record["chunks"])
    assert proofs.started == []
    assert "two: failed before, skipped" in capsys.readouterr().out
    (proofs.into / "one.json").write_text('{"status": "done"')  # which is no result
    assert proofs.run({"one": THREE["one"]})[0] == 0
    assert proofs.started == ["one"]
    assert "one.json cannot be read" in capsys.readouterr().out


@pytest.mark.long
def test_a_chunk_of_other_code_or_of_another_gpu_runs_again(proofs, capsys):
    others = {"git_commit": "f" * 40, "sources_sha256": "0", "gpu_name": "another GPU", "stand_in": True}
    chunks = dict.fromkeys([*others, "same"], chunk("passes"))
    proofs.run(chunks)
    assert proofs.started == [*chunks]
    made = proofs.result("same")
    for key, value in others.items():
        (proofs.into / f"{key}.json").write_text(json.dumps(proofs.result(key) | {key: value}))
    _, record = proofs.run(chunks, only=("same",))
    assert [each["chunk"] for each in record["chunks"]] == ["same"]  # the record has nothing of the others
    assert record["missing"] == [*others]
    proofs.run(chunks)
    assert proofs.started == [*others]
    said = capsys.readouterr().out
    for key in others:
        assert f"{key} runs again: it was made with other {key}\n" in said
        assert proofs.result(key)[key] == made[key]


def test_the_budget_ends_before_a_chunk_that_would_not_fit(proofs, capsys):
    """Also before shorter ones behind it: the order is that of what they tell."""
    chunks = {"one": THREE["one"], "long": chunk("passes", seconds=100, rehearsal=1), "three": THREE["three"]}
    code, record = proofs.run(chunks, budget=60)
    assert (code, proofs.started, record["missing"]) == (0, ["one"], ["long", "three"])
    said = capsys.readouterr().out
    assert "stopped before long: it takes about 100 s of " in said
    assert "left: long, three; the same command continues" in said


def test_a_killed_chunk_leaves_no_half_file_and_runs_again(proofs, capsys):
    code, _ = proofs.run({"one": chunk("is_killed"), "three": THREE["three"]})
    assert code == 1
    assert proofs.started == ["one", "three"]
    assert proofs.result("one")["status"] == "error"
    assert "was killed with SIGKILL" in proofs.result("one")["message"]
    (proofs.into / "work" / "memory").touch()
    code, record = proofs.run({"one": chunk("is_killed"), "three": THREE["three"]})
    assert (code, [each["verdict"] for each in record["chunks"]]) == (0, ["passed", "passed"])
    assert set(proofs.started) == {"one"}
    assert "one runs again: it ended with an error" in capsys.readouterr().out
    assert sorted(path.name for path in (proofs.into / "work").iterdir()) == ["memory"]


def test_a_killed_command_takes_its_chunk_along_and_continues(proofs):
    """Else two chunks would share the GPU."""
    proofs.run({"one": THREE["one"]})
    chunks = {"one": THREE["one"], "two": chunk("lasts")}
    child = multiprocessing.get_context("fork").Process(target=proofs.run, args=(chunks,))
    child.start()
    lasting = proofs.into / "work" / "lasting.txt"
    process = Path("/proc", within(lambda: lasting.exists() and lasting.read_text()))
    child.kill()
    child.join()
    within(lambda: not process.exists())
    assert sorted(path.name for path in proofs.into.iterdir()) == ["gpu.json", "gpu.md", "one.json", "work"]
    assert proofs.started == ["one", "two"]
    code, record = proofs.run({"one": THREE["one"], "two": THREE["three"]})
    assert (code, len(record["chunks"]), proofs.started) == (0, 2, ["two"])


def test_the_page_and_the_sentence_of_a_gpu(proofs):
    _, record = proofs.run({"one": THREE["one"], "two": THREE["two"]})
    page = gpu_page(record, source="gpu.json")
    assert page.startswith("# What holds on a GPU\n\n1 of 2 chunks passed on 1 x a GPU.")
    assert "| MFU of GPT-2 small | 40% | 41% | llm.c on 8 H100 |" in page
    assert "| DDP's efficiency from 1 to 8 GPUs | not measured | 98% | one machine |" in page
    assert "* two: a loss is off by 1.0e+00" in page and "* one: it is slow" in page
    assert "## one\n\nNothing is wrong.\n\n* a figure is 0.5\n" in page
    assert readme_sentence(record) == (
        "[The proof](docs/gpu.md): 1 of 2 chunks passed on 1 x a GPU. MFU of GPT-2 small: 40% (41%: llm.c on 8 H100)."
    )
    assert "No GPU has run this code yet" in readme_sentence(None)


@pytest.mark.long
def test_no_figure_of_a_stand_in_reaches_the_readme(proofs):
    """Its page says in the title what it is, and compares nothing with what others published."""
    _, record = proofs.run({"one": chunk("passes", seconds=100)}, budget=60, stand_in=True)
    assert record["missing"] == []  # a rehearsal takes less
    assert proofs.result("one")["stand_in"] is True
    page = gpu_page(record, source="gpu.json")
    assert page.startswith("# A rehearsal on a STAND-IN GPU: no figure here is of a GPU\n")
    assert "published" not in page
    with pytest.raises(UserError, match="a stand-in GPU says nothing about a GPU"):
        readme_sentence(record)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.0, 1e-3], []),
        ([0.0, 4e-3], ["cell 1: a loss is off by 4.0e-03"]),
        ([0.0, None], ["cell 1: its losses are compared with none"]),
        ([], ["nothing is compared"]),
    ],
)
def test_trainings_that_are_not_compared_fail(monkeypatch, tmp_path, differences, expected):
    compared = [{"cell": f"cell {number}", "largest_loss_difference": off} for number, off in enumerate(differences)]
    weak = {"kind": "weak scaling", "cells": [{"cell": "weak", "largest_loss_difference": None}]}
    record = {"cells": [], "comparisons": [{"kind": "same training", "cells": compared}, weak]}
    monkeypatch.setattr(Proof, "record", lambda *_: record)
    monkeypatch.setattr("dsgpt.benchmarks.gpu_chunks.suite_of", lambda _: SimpleNamespace(summary=lambda _: []))
    proof = Proof(folder=tmp_path, gpus=1, stand_in=False)
    assert proof.trained(SweepPlan(name="x", cells=(), comparisons=())).failures == expected


def test_every_chunk_says_what_it_shows_and_what_passes():
    for name, each in CHUNKS.items():
        says, limit = each.paragraphs
        assert says.endswith(".") and limit.endswith("."), name
        assert max(each.seconds, each.rehearsal) < gpu.MOST_SEC, name


def test_a_machine_without_a_gpu_is_refused(tmp_path):
    done = run_script(COMMAND, ["gpu", "--into", tmp_path / "into"], cwd=REPOSITORY)
    assert done.returncode == 2
    assert re.search(r"error: no NVIDIA GPU answers here \(.*\): --stand_in rehearses the proof", done.stderr)


def rehearsed(folder: Path, *words: object) -> tuple[Any, Record]:
    done = run_script(COMMAND, ["gpu", "--stand_in", "--into", folder, *words], cwd=REPOSITORY)
    return done, json.loads((folder / "gpu.json").read_text())


SHORT = ("smoke", "truth", "decoding", "profile", "server", "all-bus", "all-profile")
"""Chunks whose parts nothing else tests. Those of the others are in gpu_rehearsal/, and cells, pairs and sweeps of the
suites in tests of their own; the whole rehearsal (docs/gpu.md) takes 18 minutes."""


@pytest.mark.long
def test_the_short_chunks_of_a_rehearsal(tmp_path):
    """Real trainings under real launchers, with stand-in GPUs; the second call continues the first."""
    done, record = rehearsed(tmp_path / "into", "--only", *SHORT, "--budget", 60)
    assert done.returncode == 0, done.stdout
    smoke = record["chunks"][0]
    assert (smoke["chunk"], smoke["verdict"], smoke["stand_in"]) == ("smoke", PASSED, True)
    cells = smoke["figures"]["cells"]
    assert [cell["turns"][0]["state"] for cell in cells] == ["done"] * 3
    assert max(cell["final_loss"] for cell in cells) - min(cell["final_loss"] for cell in cells) < 1e-3
    assert record["missing"]
    done, record = rehearsed(tmp_path / "into", "--only", *SHORT)
    assert done.returncode == 0, done.stdout[-5000:]
    verdicts = {each["chunk"]: each["verdict"] for each in record["chunks"]}
    assert verdicts == dict.fromkeys(SHORT, PASSED)


def test_the_cells_on_gpus():
    """Five strategies in three precisions; every strategy that runs on one rank; two models."""
    groups = plan.gpu_cells(8)
    assert {cell.key for cell in groups[plan.MEMORY]} & {"baseline-small-fp32-b8", "zero3-small-fp16-b8"}
    assert len({cell.key for group in groups.values() for cell in group}) == sum(map(len, groups.values()))
    assert len(groups[plan.MEMORY]) == 15 and {cell.ranks for cell in groups[plan.WAITS]} == {1}
    assert {cell.fit for cell in groups[plan.STEPS]} == {True, False}
