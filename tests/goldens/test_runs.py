"""What a short run of each strategy prints, writes and computes; ``--snapshot-update`` remakes the goldens."""

import json
import re
import shutil
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, command_line
from syrupy.extensions.json import JSONSnapshotExtension
from training_runs import SCRIPT, finished, read_lines, read_record

DATA = Path(__file__).with_name("old_checkpoints")
"""Committed, so that the losses depend on no library's random numbers."""


class Way(NamedTuple):
    """How a strategy is asked for."""

    run_type: str
    recipe: str
    """A file of ``ds_configs/``."""
    ranks: int | None = 2
    changes: dict[str, dict[str, Any]] | None = None
    """Keys that are laid over blocks of the recipe."""


STRATEGIES = {
    "baseline": Way("baseline", "zero1", None),
    "ddp": Way("ddp", "zero1"),
    "fsdp": Way("fsdp", "zero1"),
    "fsdp-offload": Way("fsdp", "zero1", changes={"dsgpt": {"fsdp": {"cpu_offload": True}}}),
    **{f"zero{stage}": Way("optimized", f"zero{stage}") for stage in range(4)},
    "zero1-offload": Way("optimized", "zero1", changes={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "zero2-offload": Way("optimized", "zero2_offload"),
    "zero3-offload": Way("optimized", "zero3_offload"),
    "zero3-nvme": Way("optimized", "zero3_nvme"),
    **{name: Way("optimized", name) for name in ("tensor", "pipeline", "sequence")},
    "3d": Way("optimized", "3d", ranks=4),
}
SETTINGS = {
    "ddp-bf16": Way("ddp", "zero1"),
    "zero0-bf16": Way("optimized", "zero0"),
    "zero1-alone-bf16": Way("optimized", "zero1", ranks=1),
    "tensor-zero0": Way("optimized", "tensor", ranks=4, changes={"zero_optimization": {"stage": 0}}),
    "tensor-zero0-bf16": Way("optimized", "tensor", ranks=4, changes={"zero_optimization": {"stage": 0}}),
    "3d-zero0": Way("optimized", "3d", ranks=4, changes={"zero_optimization": {"stage": 0}}),
    "pipeline-bf16": Way("optimized", "pipeline", ranks=4),
    "sequence-zero3": Way("optimized", "sequence", changes={"zero_optimization": {"stage": 3}}),
    "zero3-dropout": Way("optimized", "zero3"),
    "tensor-dropout": Way("optimized", "tensor"),
}
"""Runs that other code computes, of which only the losses are goldens."""
LONG = ("zero0-bf16", "tensor-zero0-bf16", "zero3-dropout")
"""Those of what other quick tests compare: bf16 in the core of the parity suite, masks in tests/strategies."""
MORE = {"baseline": {"no_inference": None, "track": "csv"}, "ddp": {"profile_comm": 2}}
MORE |= {name: {"precision": "bf16"} for name in SETTINGS if "bf16" in name}
MORE |= {name: {"dropout": 0.1, "activation_checkpointing": True} for name in SETTINGS if "dropout" in name}
"""Flags of single runs, for files and keys that a run has only with them."""
SMALL = {
    "reduce_bucket_size": 5_000,
    "stage3_prefetch_bucket_size": 5_000,
    "stage3_param_persistence_threshold": 200,
    "stage3_max_live_parameters": 20_000,
    "stage3_max_reuse_distance": 20_000,
}
"""In parameters: with the shipped sizes this model is one bucket, and ZeRO-3 shards nothing."""
BOUND = 2e-6
"""Relative, between CPUs. Other instruction sets change the losses by 2e-7, a learning rate that is 0.1% off by more
than 1e-5."""

VARIES = re.compile(r"loss|%|\d s\b|^  ")
"""In lines whose numbers differ from run to run: of losses, shares and times, and rows of tables."""
VANISHES = re.compile(r"^other processes used|: hashed again; ")
"""In lines that only a busy machine has, or the first run with data that git has just written."""


class Run(NamedTuple):
    """A run that has ended."""

    folder: Path
    done: "CompletedProcess[str]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """A function from a strategy to its run, which is made once."""
    folder, runs = tmp_path_factory.mktemp("goldens"), dict[str, Run]()
    shutil.copytree(DATA, folder, ignore=shutil.ignore_patterns("zero*"), dirs_exist_ok=True)

    def get(name: str) -> Run:
        if name not in runs:
            way = (STRATEGIES | SETTINGS)[name]
            write_recipe(folder / f"{name}.json", way)
            flags = {"run_type": way.run_type, "deepspeed_config": f"{name}.json", "checkpoint_path": f"runs/{name}"}
            flags |= {"max_train_steps": 8, "grad_accum_steps": 2, "steps_per_print": 2, "save_every": 4}
            flags |= {"eval_every": 4, "no_inference": True} | MORE.get(name, {})
            done = run_script(SCRIPT, command_line(Path(), **flags), ranks=way.ranks, cwd=folder)
            finished(done)
            runs[name] = Run(folder / "runs" / name, done)
        return runs[name]

    return get


def write_recipe(path: Path, way: Way) -> None:
    recipe = json.loads((REPOSITORY / "ds_configs" / f"{way.recipe}.json").read_text(encoding="utf-8"))
    for block, changes in (way.changes or {}).items():
        recipe[block] = recipe.get(block, {}) | changes
    zero = recipe["zero_optimization"]
    zero |= {key: SMALL[key] for key in zero if key in SMALL}
    recipe["train_batch_size"] = 8
    recipe["optimizer"]["params"]["lr"] = 0.01
    recipe["scheduler"]["params"]["warmup_num_steps"] = 2
    path.write_text(json.dumps(recipe), encoding="utf-8")


class Losses(JSONSnapshotExtension):
    """Equal to the last bit on the kind of machine that they were made on, elsewhere within ``bound``."""

    bound = BOUND

    def matches(self, *, serialized_data: Any, snapshot_data: Any) -> bool:
        found, golden = json.loads(serialized_data), json.loads(snapshot_data)
        if found.pop("machine") == golden.pop("machine"):
            return bool(found == golden)
        return found.keys() == golden.keys() and all(
            values == pytest.approx(golden[key], rel=self.bound) for key, values in found.items()
        )


class LossesInBf16(Losses):
    """The same, with the bound of products that are rounded to 8 binary digits."""

    bound = 1e-2


def marked(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long) if name in LONG else name


@pytest.mark.parametrize("name", [marked(name) for name in (*STRATEGIES, *SETTINGS)])
def test_losses(run, name, snapshot):
    folder = run(name).folder
    assert not list(folder.glob("nvme-swap-*")), "offload leaves no files"
    record = read_record(folder)
    machine = {key: record["hardware"][key] for key in ("cpu_name", "instruction_sets")}
    machine["torch"] = record["env"]["torch_version"]
    found = {key: [line[key] for line in read_lines(folder, key)] for key in ("loss", "val_loss")}
    in_bf16 = record["training_config"]["precision"] == "bf16"
    assert {"machine": machine, **found} == snapshot(extension_class=LossesInBf16 if in_bf16 else Losses)
    printed = [line["interval"]["largest_loss"] / line["loss"] for line in read_lines(folder, "interval")]
    assert printed == pytest.approx([1] * len(printed), abs=0.1)  # that of a rank is of other samples
    if "dropout" not in name:
        norms, expected = ([line["grad_norm"] for line in read_lines(run(one).folder)] for one in (name, "baseline"))
        assert norms == pytest.approx(expected, rel=LossesInBf16.bound if in_bf16 else 1e-5)


def masked(text: str) -> str:
    """``text`` without what differs from run to run: losses, times, shares, places, and how busy the machine is."""
    text = text.replace(sys.executable, "PYTHON").replace(str(REPOSITORY), "REPOSITORY")
    lines = [line for line in text.splitlines() if not VANISHES.search(line)]
    return "\n".join(without_numbers(line) if VARIES.search(line) else line for line in lines)


def without_numbers(line: str) -> str:
    """``line`` with N for every number, and without the columns that their widths make."""
    words = re.sub(r"\d+ (h|min) \d\d (min|s)", "N s", line)
    return re.sub(r" {2,}", "  ", re.sub(r"\d[\d,.]*(e[+-]\d+)?", "N", words))


@pytest.mark.parametrize("name", STRATEGIES)
def test_console(run, name, snapshot):
    """And the log of the run has the same lines, up to the end of the training."""
    folder, done = run(name)
    assert masked(done.stdout) == snapshot
    assert done.stdout.startswith((folder / "train.log").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes(run, name, snapshot):
    """Of model state and traffic, counted in a step, and of memory, predicted."""
    record = read_record(run(name).folder)
    assert json.dumps({"cost": record["cost"], "peak": record["summary"]["predicted_peak_memory"]}) == snapshot


def test_files(run, snapshot):
    """Names of all files, and every key and type in them, with the strategies that have it."""
    strategies: dict[str, list[str]] = defaultdict(list)
    for name in STRATEGIES:
        for line in described(run(name).folder):
            strategies[line].append(name)
    table: dict[str, list[str]] = defaultdict(list)
    for line, names in strategies.items():
        table["every strategy" if len(names) == len(STRATEGIES) else ", ".join(names)].append(line)
    assert "\n\n".join("\n  ".join([f"{names}:", *sorted(lines)]) for names, lines in sorted(table.items())) == snapshot


OF_MACHINES = {".cpu_share_of_others": "float or null", ".cuda_version": "str or null"}
"""Types of what is null on some machines."""


def described(folder: Path) -> list[str]:
    """``step-N/run_state.json .epochs[].steps: int`` for each file, key and type in ``folder``."""
    types: dict[str, set[str]] = defaultdict(set)
    for path in filter(Path.is_file, folder.rglob("*")):
        name = re.sub(r"\d{8}", "N", str(path.relative_to(folder)))
        for at, kind in contents(path):
            kinds = next((kinds for end, kinds in OF_MACHINES.items() if at.endswith(end)), kind)
            types[f"{name} {at}"].add(kinds)
    return [f"{at}: {' or '.join(sorted(kinds))}" for at, kinds in types.items()]


def contents(path: Path) -> Iterator[tuple[str, str]]:
    """Places in a file, with the type of what is there; of a file of tensors, their types and shapes."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        (length,) = struct.unpack("<Q", data[:8])
        for name, about in json.loads(data[8 : 8 + length]).items():
            whole, *piece = re.split(r"\[.+\]", name)  # where a rank's piece lies depends on the strategy
            shape = "a piece" if piece else about.get("shape")
            yield "".join([whole, *piece]), f"{about['dtype']} {shape}" if "dtype" in about else str(about)
    elif path.parent.name == "tokenizer":
        yield "", "as in the data"
    elif path.suffix in {".json", ".jsonl"}:
        for text in data.splitlines() if path.suffix == ".jsonl" else [data]:
            yield from types_in(json.loads(text))
    elif path.suffix == ".csv":
        yield "columns", data.decode().splitlines()[0]
    else:  # the log is compared with the console
        yield "", "" if path.suffix == ".log" else without_numbers(data.decode()).strip()


def types_in(value: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """``.epochs[].steps``, ``int``."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from types_in(below, f"{at}.{key}")
    elif isinstance(value, list) and value:
        for below in value:
            yield from types_in(below, f"{at}[]")
    else:
        yield at, "null" if value is None else type(value).__name__
