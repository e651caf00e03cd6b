"""Files of every kind that the product reads, and ways to mangle them."""

import contextlib
import copy
import functools
import hashlib
import importlib
import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harmful_tokenizers import seal
from safetensors.torch import load_file
from small_run import REPOSITORY, command_line
from training_runs import resolved

from dsgpt.benchmarks.sweep_cells import read_description
from dsgpt.charts.comparison import comparison_markdown, console_summary
from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import read_run_state
from dsgpt.checkpoints.pieces import open_weights
from dsgpt.checkpoints.store import find_checkpoint, open_model_files
from dsgpt.common.errors import Problems
from dsgpt.common.json_files import JsonError
from dsgpt.config.run_config import RunConfig
from dsgpt.data.download import downloaded_source
from dsgpt.data.preparation import Place
from dsgpt.formats.hugging_face import PretrainedWeights, weight_files
from dsgpt.formats.tokenizer_files import end_of_text_id, token_ids
from dsgpt.inference.model_files import build_model, export
from dsgpt.machine.console import Console
from dsgpt.machine.device import HostGroup
from dsgpt.record.runs import read_run
from dsgpt.record.schema import STEPS_FILE, drop_steps_after, read_steps
from dsgpt.record.suites import read_sweep
from dsgpt.telemetry.meter import StepMeter
from dsgpt.training.command import train
from dsgpt.training.journal import Journal, open_sinks
from dsgpt.training.run_description import CHANGES_KEY, describe_run, settings_to_match
from dsgpt.training.run_folder import EarlierRecord, ResumePoint, plan_resume, read_earlier_record

# Seeded damage to files: to their bytes, and to the values of JSON that stays JSON.


ODD_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2**63, 10**30, 10**400, 1e308, -0.5, 0.5,
    "", "a", "1", "../../outside", "/etc/hostname", "\0", "\u202e\n", "x" * 300, "x" * 5000, "\u00e9" * 200,
    [], {}, [[]], [None], {"": {}}, ["a", 1, None], {"type": []},
]  # fmt: skip
RAW_TEXTS = [
    b"", b" ", b"null", b"[]", b"{}", b'"text"', b"NaN", b"[" * 200_000, b'{"a":' * 5000 + b"1" + b"}" * 5000,
    b"\xff\xfe{\0}\0", b"\xef\xbb\xbf{}", b'{"step": 1e999}', b'["\\ud800"]',
    b"\x80\x04}q\x00.",  # a pickle
    b"9" * 10_000, b"x" * 300, b"\xff" * 190,
]  # fmt: skip


def mangle_bytes(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one thing wrong with its bytes."""
    place, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    ways = [
        lambda: data[:place],
        lambda: data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :],
        lambda: data[:place] + data[end:],
        lambda: data[:end] + data[place:],
        lambda: data[:place] + chance.randbytes(chance.randrange(1, 9)) + data[place:],
        lambda: data[:place] + chance.choice((b"[", b"{", b'"', b",", b":", b"\\", b"\0")) + data[place:],
        lambda: chance.choice(RAW_TEXTS),
    ]
    return chance.choice(ways)()


def mangle_json(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to three values or keys changed; still JSON."""
    value = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = _changed(value, chance)
    return json.dumps(value).encode()


def either(data: bytes, chance: random.Random) -> bytes:
    """Mangle the JSON or the bytes."""
    return mangle_json(data, chance) if chance.random() < 0.7 else mangle_bytes(data, chance)


def history(data: bytes, chance: random.Random) -> bytes:
    """Mangle what a run state says about finished epochs and resumes, which a resumed run continues; still JSON."""
    value, key = json.loads(data), chance.choice(("epochs", "changes"))
    return json.dumps(value | {key: _changed(value[key], chance)}).encode()


def _changed(value: Any, chance: random.Random) -> Any:
    """``value`` with one place in it changed, chosen by descending at random."""
    value = copy.copy(value)
    if not value or not isinstance(value, dict | list) or chance.random() < 0.05:
        return copy.deepcopy(chance.choice(ODD_VALUES))
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    way = chance.random()
    if way < 0.15:
        del value[key]
    elif way < 0.25 and isinstance(value, dict):
        value[chance.choice(("", "unknown", "x" * 300, str(key).upper()))] = value[key]
    elif way < 0.3 and isinstance(value, list):
        value += [value[key]] * chance.choice((1, 50))
    else:
        value[key] = _changed(value[key], chance)
    return value


def mangle_lines(data: bytes, chance: random.Random) -> bytes:
    """JSON lines with one line mangled, lost or doubled."""
    lines = data.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    ways = [
        lambda: [],
        lambda: [lines[place]] * 2,
        lambda: [mangle_json(lines[place], chance) + b"\n"],
        lambda: [mangle_bytes(lines[place], chance)],
    ]
    return b"".join([*lines[:place], *chance.choice(ways)(), *lines[place + 1 :]])


def mangle_safetensors(data: bytes, chance: random.Random) -> bytes:
    """A safetensors file with its header (a length and JSON) mangled, or its bytes."""
    size = int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        return mangle_bytes(data, chance)
    header = mangle_json(data[8 : 8 + size], chance)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def flip_bits(data: bytes, chance: random.Random) -> bytes:
    """``data`` with one to three bits flipped, mostly in its first half kilobyte, where opcodes of a pickle are."""
    flipped = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        end = len(data) if chance.random() < 0.1 else min(len(data), 512)
        flipped[chance.randrange(end)] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def mangle_torch(data: bytes, chance: random.Random) -> bytes:
    """A file of ``torch.save``: a zip archive with a mangled pickle; before torch 1.6, only pickles."""
    if chance.random() < 0.2:
        return mangle_bytes(data, chance)
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return flip_bits(data, chance)
    mangled = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(mangled, "w") as after:
        for name in before.namelist():
            part = before.read(name)
            if name.endswith("/data.pkl"):
                part = chance.choice((flip_bits, flip_bits, flip_bits, mangle_bytes))(part, chance)
            after.writestr(name, part)
    return mangled.getvalue()


# Every kind of file that may come from somebody else, and the code that reads it, called as a user's command would.


REFERENCE = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores"
RUN = {"num_layers": 1, "max_train_steps": 12, "save_every": 3, "keep_checkpoints": 9, "eval_every": 3}
"""12 steps, with 5 in an epoch."""
CPU = torch.device("cpu")
Mangle = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Kind:
    """One kind of file: where it lies, how it is mangled, and what reads it."""

    file: str
    """Inside the folder of the test."""
    read: Callable[[Path], object]
    """Gets that folder; may raise the errors that a user sees as one line."""
    mangle: Mangle = either
    count: int = 100


def _train(folder: Path, **changes: object) -> int:
    """Read and check everything for a training without training; return the exit code."""
    return train(command_line(folder, **RUN | {"dry_run": True} | changes))


def resume(folder: Path, *, sealed: bool = True) -> None:
    """Plan to resume the run, restore its state, and load its model for generation.

    If ``sealed``, its manifests have the hashes of the files as they are, as from an attacker: else the hash finds all.
    """
    for checkpoint in (folder / "run").glob("step-*") if sealed else ():
        seal(checkpoint)
    if _train(folder, resume=True) == 0:
        restore(folder)
    store.name_newest_and_best(folder / "run")
    files = open_model_files(find_checkpoint(folder / "run", which="latest", flag="--checkpoint"))
    build_model(files.config, {name: stored.read() for name, stored in open_weights(files).items()}, device=CPU)
    find_checkpoint(folder / "run", which="best", flag="--checkpoint")


@functools.cache
def _described(folder: Path) -> tuple[RunConfig, dict[str, str | None], dict[str, Any]]:
    """The resumed run's configuration, hashes and description. They depend on no file of the run, and git is slow."""
    config = resolved(command_line(folder, **RUN, resume=True))
    files = {"train": config.train.path, "val": config.val.path}
    hashes = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    hashes["initial weights"] = None
    return config, hashes, describe_run(config, ResumePoint(), hashes=hashes)


def restore(folder: Path) -> None:
    """What a resumed run does with the state and the record that the plan accepted, up to its next checkpoint."""
    config, hashes, description = _described(folder)
    start = plan_resume(config, settings=settings_to_match(config, hashes=hashes), problems=Problems())
    if start.checkpoint is None:
        return
    state, lines = read_run_state(start.checkpoint), config.run_dir / STEPS_FILE
    drop_steps_after(lines, state.step)
    description = {**description, "run_id": start.run_id, CHANGES_KEY: list(start.changes)}
    sinks = open_sinks(config, done=state.step)
    journal = Journal(config, device=CPU, description=description, sinks=sinks, ranks=HostGroup(), done=state.step)
    earlier = None
    with contextlib.suppress(JsonError):  # a resume reports it and continues without the record
        earlier = read_earlier_record(config.run_dir)
    journal.resume(state, lines, earlier=earlier or EarlierRecord())
    journal.epoch_done(len(state.epochs))
    journal.state(state.step).write(folder)
    read_run_state(folder)
    journal.close()


def plan(folder: Path) -> None:
    """Plan a training of each kind that reads a recipe."""
    for run_type in ("baseline", "optimized"):
        _train(folder, run_type=run_type, checkpoint_path=folder / "new")


def restore_lines(folder: Path) -> None:
    """What a resumed run does with the lines of the process before it."""
    lines = folder / "run" / "metrics.jsonl"
    drop_steps_after(lines, 9)
    meter = StepMeter(CPU, tokens_per_step=128)
    meter.resume(read_steps(lines), done=9, epoch_start=5)


def compare(folder: Path) -> None:
    """Compare the run with itself."""
    runs = [read_run(folder / "run", name=name) for name in ("one", "two")]
    comparison_markdown(runs)
    console_summary(runs)


def publish(folder: Path, *, name: str = "hf") -> None:
    """Open a Hugging Face folder as ``--init_from`` does."""
    for tensor in PretrainedWeights(folder / name).tensors().values():
        tensor.read()


def read_vocabulary(folder: Path) -> None:
    """Compare and export tokenizers."""
    token_ids(folder / "tokenizer")
    end_of_text_id(folder / "tokenizer")


def prepared(folder: Path) -> None:
    """Open a preparation, and read the documents of a downloaded set."""
    Place(folder=folder, suffix="").complete()
    source = downloaded_source("set", output_dir=folder)
    if source is not None:
        list(source.documents())


def page(suite: str) -> Callable[[Path], None]:
    """Make the page of a suite from a record, as ``--table-from`` does."""

    def read(folder: Path) -> None:
        from dsgpt.benchmarks.frame import make_page

        module = importlib.import_module(f"dsgpt.benchmarks.{suite}")
        kind = getattr(module, "SweepSuite" if suite == "sweep" else suite.title())
        make_page(kind, folder / f"{suite}.json", folder / "page.md", repository=folder)

    return read


def compare_sweeps(folder: Path) -> None:
    """Compare a sweep with itself, and say what its charts say."""
    from dsgpt.benchmarks.sweep_page import compare
    from dsgpt.charts.sweeps import charts_of_sweep

    charts_of_sweep(read_sweep(folder / "sweep.json"), name="mine")
    compare(str(folder / "sweep.json"), str(folder / "sweep.json"), allow_unequal=True)


NEWEST = "run/step-00000009"
KINDS = {
    "recipe": Kind("recipe.json", plan, count=250),
    "sidecar": Kind("train.json", plan, count=150),
    "manifest": Kind(f"{NEWEST}/manifest.json", functools.partial(resume, sealed=False), count=200),
    "run_state": Kind(f"{NEWEST}/run_state.json", resume, count=100),
    "history in a run_state": Kind(f"{NEWEST}/run_state.json", resume, mangle=history),
    "training_state": Kind(f"{NEWEST}/training_state.json", resume, count=50),
    "model": Kind(f"{NEWEST}/model.json", resume, count=100),
    "weights": Kind(f"{NEWEST}/model.safetensors", resume, mangle=mangle_safetensors),
    "moments": Kind(f"{NEWEST}/optimizer.safetensors", resume, mangle=mangle_safetensors),
    "random state": Kind(f"{NEWEST}/random-00000.safetensors", resume, mangle=mangle_safetensors, count=50),
    "record of a run": Kind("run/training_metrics.json", resume),
    "config of a run": Kind("run/config.json", resume, count=50),
    "latest": Kind("run/latest", resume, mangle=mangle_bytes, count=30),
    "lines": Kind("run/metrics.jsonl", restore_lines, mangle=mangle_lines, count=150),
    "record in charts": Kind("run/training_metrics.json", compare, count=150),
    "lines in charts": Kind("run/metrics.jsonl", compare, mangle=mangle_lines),
    "published shape": Kind("hf/config.json", publish, count=60),
    "best": Kind("run/best", resume, mangle=mangle_bytes, count=20),
    "published index": Kind("parts/pytorch_model.bin.index.json", lambda at: weight_files(at / "parts"), count=40),
    "published weights": Kind("hf/model.safetensors", publish, mangle=mangle_safetensors, count=40),
    **{
        f"{name} weights": Kind(f"{name}/pytorch_model.bin", functools.partial(publish, name=name), mangle_torch, 200)
        for name in ("pickled", "old pickled")
    },
    "vocabulary": Kind("tokenizer/tokenizer.json", read_vocabulary, count=60),
    "settings of a tokenizer": Kind("tokenizer/tokenizer_config.json", read_vocabulary, count=40),
    "preparation": Kind("preparation.json", prepared, count=50),
    "download": Kind("raw/download.json", prepared, count=60),
    "documents": Kind("raw/documents.jsonl", prepared, mangle=mangle_lines, count=60),
    **{f"record of {name}": Kind(f"{name}.json", page(name), count=20) for name in ("resume", "faults")},
    "record of saving": Kind("saving.json", page("saving"), count=40),
    "record of parity": Kind("parity.json", page("parity"), count=10),
    "record of a sweep": Kind("sweep.json", page("sweep"), count=30),
    "sweep in charts": Kind("sweep.json", compare_sweeps, count=20),
    "description of a sweep": Kind(
        "described.json", lambda at: read_description(at / "described.json", devices=None), count=60
    ),
}


def write_all(folder: Path, run: Path) -> None:
    """Make a good file of every kind in ``folder``; ``run`` is a folder with data, a recipe and a finished ``run``."""
    shutil.copytree(run, folder, dirs_exist_ok=True)
    (folder / "run" / "RUN_COMPLETE.txt").unlink()
    for step in (3, 12):
        shutil.rmtree(folder / "run" / f"step-{step:08d}")
    state = json.loads((folder / NEWEST / "run_state.json").read_text())
    state["changes"] = [{"step": 3, "name": "schedule", "before": None, "after": {"type": "WarmupLR"}}]
    (folder / NEWEST / "run_state.json").write_text(json.dumps(state))
    seal(folder / NEWEST)
    parts = {"weight_map": {"wte.weight": "pytorch_model-1.bin", "wpe.weight": "pytorch_model-1.bin"}}
    cells = [{"name": "one", "devices": 2, "launcher": "torchrun", "flags": ["--run_type", "ddp"]}]
    comparisons = [{"name": "all", "kind": "weak scaling", "baseline": "one", "cells": ["one"]}]
    identity, raw = {"--seed": 1, "input": "a", "tokenizer": None}, {"documents.jsonl": {"documents": 2, "bytes": 60}}
    for name, value in {
        "preparation.json": {"identity": identity, "tokenizer_sha256": "0" * 64, "splits": {}},
        "parts/pytorch_model.bin.index.json": parts,
        "raw/download.json": {"name": "set", "source": "a test", "max_documents": None, "files": raw},
        "described.json": {
            "schema_version": "1.0", "flags": ["--seed", "1"], "cells": cells, "comparisons": comparisons
        },
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    (folder / "parts" / "pytorch_model-1.bin").touch()
    (folder / "raw" / "documents.jsonl").write_text('{"key": "a", "text": "one"}\n{"key": "b", "text": "two"}\n')
    for name in ("parity", "resume", "faults", "saving", "sweep-scaling"):
        shutil.copyfile(REFERENCE / f"{name}.json", folder / f"{name.partition('-')[0]}.json")
    export(folder / "run", folder / "hf", form="hf", dtype="fp32", which="latest", console=Console(speaks=False))
    weights = load_file(folder / "hf" / "model.safetensors")
    for name, zipped in (("pickled", True), ("old pickled", False)):  # of a zip archive, and of torch before 1.6
        (folder / name).mkdir()
        shutil.copyfile(folder / "hf" / "config.json", folder / name / "config.json")
        torch.save(weights, folder / name / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
