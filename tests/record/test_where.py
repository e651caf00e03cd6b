"""Where tokens come from: documents of a token file, of the steps of a real run, and of planted spikes."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from forked_ranks import run_script
from small_run import END_OF_TEXT, REPOSITORY, command_line, write_documents, write_recipe
from training_runs import finished, roll_back

from dsgpt.common.errors import UserError
from dsgpt.record.readings import Reading, Spike, Spikes, find_spikes, suspects
from dsgpt.record.where import main
from dsgpt.training.command import train


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """31 documents: empty, short, and longer than several windows."""
    dice = random.Random(5)
    return ["".join(dice.choices("abc def\n", k=dice.choice((0, 1, 7, 16, 50)))) for _ in range(30)] + ["x" * 150]


@pytest.fixture(scope="module")
def corpus(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("where"), texts)


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main([*map(str, words)])
    return capsys.readouterr().out


# A token file.


def test_every_token_has_the_document_that_wrote_it(corpus, texts, capsys):
    """Every document by its number and by its first and last token, compared with the texts themselves."""
    start = 0
    for number, text in enumerate(texts):
        end = start + len(text)
        for asked in (("--document", number), ("--token", start), ("--token", end)):
            out = printed(capsys, corpus / "train.bin", *asked)
            assert f": document {number} of 31\n" in out and f"tokens  {start} to {end}; " in out
            own = f"text/{number:03}.txt, byte 0" if number < 15 else r"text/lines.jsonl, byte \d+"
            assert re.search(rf"source  {own}\n", out), out
            assert "the source is unchanged, with this text there; the tokens decode to this text" in out
            assert " ".join(text[:40].split()) in out
        start = end + 1
    with pytest.raises(UserError, match=rf"has no token {start}: they are 0 to {start - 1}"):
        main([str(corpus / "train.bin"), "--token", str(start)])


# A run. Its loader notes what it gives to the trainer.


NOTING = """
import json, os, runpy, sys
from dsgpt.data import loader
read = loader.WindowDataset.__getitems__
def noted(self, windows):
    batch = read(self, windows)
    if "val.bin" not in str(self._windows.data.path):
        with open(os.environ["NOTES"] + os.environ.get("RANK", "0"), "a") as file:
            ids = [[*row, targets[-1]] for row, targets in zip(batch.inputs.tolist(), batch.targets.tolist())]
            print(json.dumps(ids), file=file)
    return batch
loader.WindowDataset.__getitems__ = noted
runpy.run_path("SCRIPT", run_name="__main__")
"""

SEGMENTS = [
    (4, 2, {"tensor_parallel": {"autotp_size": 2}}),
    (4, 1, {"sequence_parallel_size": 2}),
    (4, 2, {"pipeline": {"stages": 2, "partition": "parameters"}}),
    (2, 4, {}),
    (None, 4, {}),
]
"""Ranks, micro batch, and what is added to the recipe. Each resumes the run of the one before after three steps."""
EACH = 3


@pytest.mark.long
def test_a_step_read_what_is_printed(texts, tmp_path, capsys):
    """Peers that share a micro batch, accumulation, other ranks after a resume, and the ends of epochs.

    The data is a mixture. A source of it has two files, and a window has tokens of both. The documents of a token are
    counted here by the end-of-text ids before it.
    """
    for name, some in {"a0": texts[:12], "a1": texts[12:25], "b": texts[20:]}.items():
        write_documents(tmp_path / name, some)
    mixture = tmp_path / "mixture.json"
    mixture.write_text(json.dumps([{"path": "a?/train.bin", "weight": 2}, {"path": "b/train.bin", "weight": 1}]))
    script, run, total = tmp_path / "noting.py", tmp_path / "run", EACH * len(SEGMENTS)
    script.write_text(NOTING.replace("SCRIPT", str(REPOSITORY / "src" / "gpt2.py")))
    for place, (ranks, micro, more) in enumerate(SEGMENTS):
        run = roll_back(run, tmp_path / f"run{place}", EACH * place) if place else run
        flags = {"checkpoint_path": run, "deepspeed_config": write_recipe(tmp_path / "recipe.json", **more)}
        flags |= {"run_type": "optimized" if ranks else "baseline", "micro_batch_size_per_gpu": micro}
        flags |= {"max_train_steps": total, "save_every": EACH, "keep_checkpoints": 9, "max_val_steps": 1}
        flags |= {"train_data_path": mixture, "resume": True if place else None, "no_inference": True}
        variables = {**os.environ, "NOTES": f"{tmp_path}/{place}-"}
        words = command_line(tmp_path / "b", **flags)
        finished(run_script(script, words, ranks=ranks, cwd=tmp_path, environment=variables))
    files = {str(path): np.fromfile(path, "<u2") for path in tmp_path.glob("*/train.bin")}
    ends = {path: np.cumsum(ids == END_OF_TEXT) - (ids == END_OF_TEXT) for path, ids in files.items()}
    crossing = 0
    for place, (ranks, micro, _) in enumerate(SEGMENTS):
        for rank in range(ranks or 1):
            lines = (tmp_path / f"{place}-{rank}").read_text().splitlines()
            noted = [row for line in lines for row in json.loads(line)]
            for step in range(EACH * place + 1, EACH * (place + 1) + 1):
                samples = printed(capsys, "--run", run, "--step", step, "--rank", rank).split("\nsample ")[1:]
                assert len(samples) == {4: 4, 2: 4, None: 8}[ranks]
                for number, sample in enumerate(samples):
                    assert int(re.search(r"micro batch (\d+):", sample)[1]) == number // micro
                    spans = [
                        (int(a), int(b) + 1, path) for a, b, path in re.findall(r"(\d+) to (\d+) of (\S+)", sample)
                    ]
                    assert noted.pop(0) == [id for a, b, path in spans for id in files[path][a:b].tolist()], (
                        step,
                        rank,
                    )
                    expected = [str(document) for a, b, path in spans for document in np.unique(ends[path][a:b])]
                    assert re.findall(r"^  document (\d+): ", sample, re.MULTILINE) == expected
                    crossing += len(spans) > 1
    phase, pairs = Reading(run).phase(1), set[tuple[Path, int, int]]()
    parts = [(window, part) for window in range(phase.order.windows) for part in phase.parts(window)]
    for _, part in parts:
        pairs |= {(part.file.file.path, part.document.number, window) for window in phase.windows_of(part)}
    assert pairs == {(part.file.file.path, part.document.number, window) for window, part in parts}
    per_epoch = phase.order.steps_per_epoch
    assert crossing
    assert f"step 1 of {per_epoch} of epoch 2; 8 samples" in printed(capsys, "--run", run, "--step", per_epoch + 1)
    for words, refusal in {"--step 16": "has the steps 1 to 15", "--step 12 --rank 2": "by the ranks 0 to 1"}.items():
        with pytest.raises(UserError, match=refusal):
            main(["--run", str(run), *words.split()])


# Spikes: a small training on 900 documents, of which ten are noise.


@pytest.mark.parametrize(
    ("key", "value", "out"), [("loss", 11.3, False), ("loss", 11.4, True), ("grad_norm", 11.4, True)]
)
def test_a_step_is_compared_with_the_32_values_before_it(tmp_path, key, value, out):
    """By hand: eight times 1, 2, 3 and 4 have the median 2.5 and the deviation 1.4826; 11.396 is six above it."""
    lines = [{"step": step, "loss": 1 + step % 4, "grad_norm": 1 + step % 4} for step in range(1, 33)]
    lines += [{"step": 33, "val_loss": 99.0}, {"step": 34, "loss": 2.5, "grad_norm": 2.5, key: value}]
    lines.append({"step": 35, "loss": -99.0, "grad_norm": None})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    judged = find_spikes(tmp_path)
    assert (judged.judged, judged.steps) == ((34, 35), 34)
    assert [spike.step for spike in judged.spikes] == [34] * out
    assert not out or judged.spikes[0].values == {key: (11.4, 2.5, pytest.approx(8.9 / 1.4826))}


def test_a_loss_that_is_not_finite_stands_out(tmp_path):
    """It is null in the file. The steps behind it are no spikes; nor is a norm that fp16 skipped."""
    lines = [{"step": step, "loss": 1 + step % 4, "grad_norm": 1.0, "skipped": False} for step in range(1, 41)]
    lines[35] |= {"grad_norm": None, "skipped": True}
    lines[38] |= {"loss": None, "grad_norm": None}
    lines[39] |= {"loss": None, "grad_norm": None}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    judged = find_spikes(tmp_path)
    assert judged.words.startswith("1 of 7 steps stand out; 32 more cannot be judged")
    assert [(spike.step, spike.words) for spike in judged.spikes] == [
        (39, "loss not finite (median 2.5); gradient norm not finite (median 1)")
    ]


def test_ten_planted_documents_are_behind_the_spikes(tmp_path, capsys):
    dice, signs = random.Random(1), [chr(number) for number in range(33, 127)]
    planted = set(dice.sample(range(900), 10))
    texts = ["".join(dice.choices(signs if number in planted else "abcdefgh", k=47)) for number in range(900)]
    folder = write_documents(tmp_path / "data", texts)
    write_recipe(folder / "recipe.json", optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    words = command_line(folder, max_train_steps=None, epochs=2, eval_every=0, max_val_steps=1, save_every=0)
    assert train([*words, "--no_inference"]) == 0
    judged = find_spikes(folder / "run")
    assert judged.judged == tuple(range(33, 675)) and judged.steps == 674
    found = suspects(Reading(folder / "run"), judged)
    assert {each.document.number for each in found[:10]} == planted
    assert found[0].by_chance < 1e-3 and found[10].by_chance > 0.5
    out = printed(capsys, "--spike", folder / "run", "--top", 10)
    assert "32 more cannot be judged: fewer than 32 values are recorded before them" in out
    assert {int(number) for number in re.findall(r"by chance \S+: document ([\d,]+):", out.replace(",", ""))} == planted


# What cannot be answered, and what has changed.


def test_sources_that_changed_are_named(corpus, tmp_path, capsys):
    """By `where` and in one line at the start of a training; not on a machine that has none of them."""
    folder = shutil.copytree(corpus, tmp_path / "data")  # with all times
    dry = [*command_line(folder), "--dry_run"]
    assert train(dry) == 0 and "warning" not in capsys.readouterr().out
    assert "warning" not in printed(capsys, folder / "train.bin", "--document", 2)
    (folder / "text" / "000.txt").unlink()
    (folder / "text" / "002.txt").write_text("another text")
    os.utime(folder / "text" / "lines.jsonl", ns=(0, 0))
    line = f"warning: {folder / 'train.bin'}: 3 of its 16 sources changed since it was prepared: FOLDER/000.txt cannot"
    line += " be read any more (No such file or directory), FOLDER/002.txt has changed: it has 12 bytes and had 7, "
    line += "FOLDER/lines.jsonl was written again since, with as many bytes"
    line = line.replace("FOLDER", str(folder / "text"))
    out = printed(capsys, folder / "train.bin", "--document", 2)
    assert line in out and "the source has changed: it has 12 bytes and had 7; the tokens decode to this text" in out
    assert train(dry) == 0 and capsys.readouterr().out.splitlines().count(line) == 1
    for path in [*folder.glob("train.*")]:  # beside it a file of other sources, which are unchanged
        shutil.copy2(path, folder / path.name.replace("train", "z"))
    sources = json.loads((folder / "z.sources.json").read_text())["files"]
    (folder / "z.sources.json").write_text(json.dumps({"files": sources[1:2]}))
    (folder / "both.json").write_text(json.dumps(["train.bin", "z.bin"]))
    both = [*command_line(folder, train_data_path=folder / "both.json"), "--dry_run"]
    assert train(both) == 0 and capsys.readouterr().out.splitlines().count(line) == 1
    shutil.rmtree(folder / "text")
    assert train(dry) == 0 and "warning" not in capsys.readouterr().out


def test_a_run_whose_data_changed_read_both_files(corpus, tmp_path, capsys, texts):
    """After a resume with other data, steps before it are looked up in the old file, also if that has moved."""
    run = tmp_path / "run"
    flags = {"checkpoint_path": run, "no_inference": True, "max_train_steps": 6, "save_every": 3}
    flags |= {"keep_checkpoints": 9, "deepspeed_config": corpus / "recipe.json"}
    assert train(command_line(corpus, **flags)) == 0
    other = write_documents(tmp_path / "other", ["other", *texts])
    run = roll_back(run, tmp_path / "resumed", 3)
    assert train(command_line(other, **flags | {"checkpoint_path": run}, resume=True, allow_changed="data")) == 0
    capsys.readouterr()
    reading = Reading(run)
    for step, folder in ((3, corpus), (4, other)):
        assert reading.phase(step).windows.data.path == folder / "train.bin"
        assert (out := printed(capsys, "--run", run, "--step", step)).count(f" of {folder / 'train.bin'}\n") == 8
        assert "; 8 samples of" in out
    steps = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    record = json.loads((run / "training_metrics.json").read_text())
    for each in record["segments"]:  # as of a run that is at its fifth step
        each["last_step"] = min(each["last_step"], 5)
    (run / "training_metrics.json").write_text(json.dumps(record))
    (run / "metrics.jsonl").write_text("".join(line for line in steps if json.loads(line)["step"] < 6))
    assert "; it is not recorded as taken, and rank 0 would read 8 samples of" in printed(
        capsys, "--run", run, "--step", 6, "--rank", 0
    )
    assert "; rank 0 reads 8 samples of" in printed(capsys, "--run", run, "--step", 5, "--rank", 0)

    # Chance counts in each phase its own steps and documents: here of three steps one stands out.
    spikes = tuple(Spike(step=step, values={"loss": (9.0, 1.0, 8.0)}) for step in (2, 5))
    found = suspects(reading, Spikes(spikes=spikes, judged=tuple(range(1, 7)), steps=6))
    for folder, step in ((corpus, 2), (other, 5)):
        own = [each for each in found if each.file.file.path.parent == folder]
        assert own and {each.spikes for each in own} == {(step,)}
        assert [each.by_chance for each in own] == pytest.approx([each.steps / 3 * len(own) for each in own])
    moved = shutil.copytree(corpus, tmp_path / "moved")
    assert Reading(run, data=moved / "train.bin").phase(1).windows.data.path == moved / "train.bin"
    with pytest.raises(UserError, match=r"/moved/train\.bin: is not what the steps 4 to 6 read"):
        main([str(moved / "train.bin"), "--run", str(run), "--step", "4"])
    (moved / "train.bin").touch()  # without its time nobody knows whether it is the same
    with pytest.raises(UserError, match=r"check it first, with `dsgpt data verify"):
        main([str(moved / "train.bin"), "--run", str(run), "--step", "1"])
    (corpus / "train.index").rename(tmp_path / "index")
    with pytest.raises(UserError, match=r"train\.index: is missing"):
        main(["--run", str(run), "--step", "1"])
    (tmp_path / "index").rename(corpus / "train.index")
