"""What the ranks of every strategy observe: initial weights, dropout masks, losses, checkpoints, resumed runs.

The observations are made in ``strategy_worker.py``, with one launch for each number of ranks.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked_ranks import launches_fork
from small_run import REPOSITORY
from training_runs import data_flags, read_lines, roll_back, steps_of, weights_of

from dsgpt.benchmarks.cells import STRATEGIES, Cell, Corpus, write_recipe
from dsgpt.benchmarks.launch import IMPORTS, Assignment, Launch, read_ranks, run_job
from dsgpt.checkpoints.training_state import StateReader
from dsgpt.common.errors import EXIT_NOT_SAVED
from dsgpt.machine.probe import compiler, libaio_problem
from dsgpt.training.command import train

NO_LIBAIO = not (command := compiler()) or bool(libaio_problem(command))
LAYERS = ("--num_layers", "6")
"""Enough that one parameter is a small part of the model."""
DROPOUT = ("--dropout", "0.2")
RUN = ("--max_train_steps", "4", "--save_every", "2", "--keep_checkpoints", "9", "--max_val_steps", "1")
CHANGED = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.5, 0.6], "weight_decay": 20.0}},
    "gradient_clipping": 0.05,
}
"""Another recipe for a resumed run; betas, weight decay and clipping each have an effect within two steps."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One cell: a strategy of the parity suite, on its recipe."""

    what: str
    """A key of ``strategy_worker.OBSERVATIONS``."""
    strategy: str
    flags: tuple[str, ...] = ()
    after: str = ""
    """The cell whose run, killed in the middle, this one resumes."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """New values for keys of the recipe."""

    def words(self, corpus: Corpus, recipe: Path, run: Path) -> list[str]:
        """The flags of ``src/gpt2.py`` except the run type."""
        words = [*data_flags(corpus), "--num_layers", "2", "--num_heads", "2", "--embedding_size", "32"]
        words += ["--max_position_embeddings", "32", "--device", "cpu", "--grad_accum_steps", "2", *self.flags]
        return [*words, "--deepspeed_config", str(recipe), "--checkpoint_path", str(run)]


def recipe_of(cell: Observation, ranks: int, path: Path) -> None:
    """Write the recipe of the cell's strategy to ``path``, without a schedule: the first step changes weights."""
    plain = Cell(strategy=cell.strategy, ranks=ranks)
    write_recipe(path, plain, recipes=REPOSITORY / "ds_configs")
    values = json.loads(path.read_text(encoding="utf-8")) | {"train_batch_size": 8} | cell.recipe
    values.pop("scheduler", None)
    path.write_text(json.dumps(values), encoding="utf-8")


def _starts(*names: str, flags: tuple[str, ...]) -> dict[str, Observation]:
    return {f"start {name} {flags[-1]}": Observation(what="start", strategy=name, flags=flags) for name in names}


def _steps(*names: str) -> dict[str, Observation]:
    flags = (*DROPOUT, *LAYERS)
    return {f"steps {name}": Observation(what="steps", strategy=name, flags=flags) for name in names}


def _checkpoints(*names: str) -> dict[str, Observation]:
    return {f"checkpoint {name}": Observation(what="checkpoint", strategy=name, flags=LAYERS) for name in names}


def _runs(*names: str, save_mode: str = "sync") -> Iterator[tuple[str, Observation]]:
    """A run with dropout, and the same run resumed from its first checkpoint."""
    flags = (*RUN, *DROPOUT, "--save_mode", save_mode)
    for name in names:
        run = f"run {name}"
        yield run, Observation(what="run", strategy=name, flags=flags)
        yield f"resumed {name}", Observation(what="run", strategy=name, flags=(*flags, "--resume"), after=run)


def _recomputed(*names: str) -> dict[str, Observation]:
    """The run of ``_runs`` again; it computes activations, and therefore dropout masks, twice."""
    flags = (*RUN, *DROPOUT, "--activation_checkpointing")
    return {f"recomputed {name}": Observation(what="run", strategy=name, flags=flags) for name in names}


def _changed(*names: str) -> Iterator[tuple[str, Observation]]:
    """A run, and the same run resumed with another recipe."""
    for name in names:
        run = f"before the change {name}"
        yield run, Observation(what="run", strategy=name, flags=RUN)
        flags = (*RUN, "--resume", "--allow_changed", "recipe")
        yield f"changed {name}", Observation(what="run", strategy=name, flags=flags, after=run, recipe=CHANGED)


def _torch(*names: str) -> dict[str, Observation]:
    """Three micro batches of two sequences; 63 positions cannot be split into two equal shards."""
    flags = ("--max_position_embeddings", "63", "--seq_length", "32", "--grad_accum_steps", "3")
    recipe = {"gradient_clipping": 0, "train_batch_size": 12}
    return {f"torch {name}": Observation(what="torch", strategy=name, flags=flags, recipe=recipe) for name in names}


def _full_disks(*names: str, of: str) -> dict[str, Observation]:
    """In ``of`` "beside" a thread of the last rank fails, while training continues."""
    mode, what = "async" if of == "beside" else "sync", f"full disk of {of}"
    flags = (*RUN, "--on_save_failure", "stop", "--save_mode", mode)
    return {f"{what} {name}": Observation(what=what, strategy=name, flags=flags) for name in names}


REPLICAS = ("ddp", "fsdp")
SPLIT = ("tensor2-zero1", "sequence2-zero1", "pipeline2-zero1")
NVME = () if NO_LIBAIO else ("zero3-nvme",)
START_FP32 = ("zero0", "zero2-offload")
START_BF16 = ("zero0", "zero1", "zero3", *NVME, *SPLIT)
SPLIT_STATE = ("zero1", "zero3", *NVME, "fsdp", "tensor2-zero1", "pipeline2-zero1")
RESUMED = (*SPLIT, "zero2-offload", "zero3-offload", *NVME)
SAVED_BESIDE = ("zero0", "zero3", "fsdp")
"""Strategies whose runs save while they train, and are resumed."""
RECOMPUTED = (*SPLIT, "zero3-offload", "fsdp")
SUMMED_BY_MANY = "ddp"
"""A strategy that needs more than two ranks here: the sum of two numbers does not depend on their order."""
CHANGED_STRATEGIES = ("zero1", "zero3-offload", *NVME, "pipeline2-zero1", "fsdp")
FULL_DISK = ("zero3", *NVME, "pipeline2-zero1", "fsdp")
COMPILED = ("zero3", *SPLIT)
"""Strategies that compile blocks, and not the model."""
THREE_D = "pipeline2-tensor2-zero1"
SUMMED_BY_STAGES = "pipeline2-zero0"
"""Sums of more than two data ranks are rounded differently by two stages, which both have the tied embedding."""

CELLS: dict[int, dict[str, Observation]] = {
    2: {
        **_starts(*START_FP32, flags=("--precision", "fp32")),
        **_starts(*START_BF16, flags=("--precision", "bf16")),
        **_starts("zero3-offload", flags=LAYERS),
        **_steps(*REPLICAS, "zero3", *SPLIT),
        **_checkpoints(*SPLIT_STATE),
        **_torch(*REPLICAS),
        **{f"graphs {name}": Observation(what="graphs", strategy=name, flags=LAYERS) for name in COMPILED},
        **dict(_runs(*RESUMED)),
        **dict(_runs(*SAVED_BESIDE, save_mode="async")),
        **_recomputed(*RECOMPUTED),
        **dict(_changed(*CHANGED_STRATEGIES)),
        **_full_disks(*FULL_DISK, of="main"),
        **_full_disks(*FULL_DISK[:1], of="last"),
        **_full_disks(*FULL_DISK[:1], of="beside"),
    },
    4: {**_steps(*SPLIT), **dict(_runs(SUMMED_BY_MANY)), **_recomputed(SUMMED_BY_MANY)},
    8: {
        **_steps(THREE_D),
        f"steps {SUMMED_BY_STAGES}": Observation(what="steps", strategy=SUMMED_BY_STAGES, flags=DROPOUT),
        **dict(_runs(THREE_D)),
    },
}
"""Number of ranks to name of a cell to the cell, in the order in which they run."""


class Asked(NamedTuple):
    """The cell that a test needs, as its parameter ``cell``."""

    ranks: int
    name: str

    def __str__(self) -> str:
        """For test ids."""
        return f"{self.name}-{self.ranks}"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How a cell ended."""

    folder: Path
    ranks: list[dict[str, Any]]
    """What each rank observed."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(json.loads((self.folder / "run.json").read_text(encoding="utf-8")))

    def log(self, rank: int) -> str:
        """What a rank printed."""
        return (self.folder / f"rank-{rank}.log").read_text(encoding="utf-8")


class Launched:
    """A launch of cells on one number of ranks, in order. ``seen`` waits for a cell and those before it."""

    def __init__(self, ranks: int, wanted: set[str], folder: Path, corpus: Corpus) -> None:
        self._folder, self._ranks = folder, ranks
        wanted = wanted | {CELLS[ranks][name].after for name in wanted}
        self._names = [name for name in CELLS[ranks] if name in wanted]
        assignments = [self._assignment(name, corpus) for name in self._names]
        job = Launch(launcher="torchrun", ranks=ranks, cells=len(assignments))  # starts in a third of deepspeed's time
        imports = [*IMPORTS["torchrun"], *IMPORTS["deepspeed"]]
        self._coming = run_job(job, assignments, job_file=folder / "job.json", device="cpu", imports=imports)
        self._done = 0

    def _assignment(self, name: str, corpus: Corpus) -> Assignment:
        cell = CELLS[self._ranks][name]
        folder = self._folder / name
        folder.mkdir()
        recipe_of(cell, self._ranks, folder / "recipe.json")
        run = self._folder / cell.after / "killed" if cell.after else folder / "run"
        (folder / "run.json").write_text(json.dumps(str(run)), encoding="utf-8")
        words = [cell.what, "--run_type", STRATEGIES[cell.strategy].run_type]
        words += cell.words(corpus, folder / "recipe.json", run)
        return Assignment(folder=str(folder), flags=words, call="strategy_worker:observe")

    def seen(self, name: str) -> Seen:
        """How the cell of this name ended."""
        index, folder = self._names.index(name), self._folder / name
        with launches_fork(), pytest.MonkeyPatch.context() as patch:
            here = Path(__file__).parent
            patch.setenv("PYTHONPATH", f"{here}:{here.parent}", prepend=os.pathsep)
            while self._done <= index:
                if (end := next(self._coming, None)) is None:
                    pytest.fail((self._folder / "job.log").read_text(encoding="utf-8", errors="replace")[-3000:])
                self._done = end[0] + 1
        seen = Seen(folder=folder, ranks=read_ranks(folder, self._ranks))
        for rank, end in enumerate(seen.ranks):
            assert end["status"] == "done", f"rank {rank}: {end['message']}\n{seen.log(rank)}"
        return seen

    def close(self) -> None:
        """Stop the launch."""
        self._coming.close()


@pytest.fixture(scope="session")
def seen(request, tmp_path_factory, corpus):
    """A function from a cell to what its ranks observed. Runs only cells that selected tests have as parameter."""
    items = (item for item in request.session.items if "seen" in getattr(item, "fixturenames", ()))
    values = (value for item in items if hasattr(item, "callspec") for value in item.callspec.params.values())
    wanted = {value for value in values if isinstance(value, Asked)}
    launches: dict[int, Launched] = {}

    def get(cell: Asked):
        if cell.ranks not in launches:
            names = {name for ranks, name in wanted if ranks == cell.ranks}
            folder = tmp_path_factory.mktemp(f"ranks-{cell.ranks}-")
            launches[cell.ranks] = Launched(cell.ranks, names, folder, corpus)
        return launches[cell.ranks].seen(cell.name)

    yield get
    for launched in launches.values():
        launched.close()


# Initial weights follow from seed and name alone on every rank; no rank ever holds the whole of a split model.


BUILT_IN_PARTS = [
    (Asked(2, f"start zero3-offload {LAYERS[-1]}"), 2),
    *((Asked(2, f"checkpoint {name}"), 2) for name in (*NVME, "fsdp")),
    *((Asked(2, f"steps {name}"), 2) for name in ("fsdp", "zero3")),
    (Asked(2, "steps pipeline2-zero1"), 2),
    (Asked(4, "steps pipeline2-zero1"), 2),
    (Asked(8, f"steps {THREE_D}"), 4),
]
START_CASES = [
    *(Asked(2, f"start {name} fp32") for name in START_FP32),
    Asked(2, "checkpoint zero1"),
    *(Asked(2, f"start {name} bf16") for name in START_BF16),
    *(Asked(ranks, f"steps {name}") for ranks in (2, 4) for name in ("tensor2-zero1", "sequence2-zero1")),
    *(cell for cell, _ in BUILT_IN_PARTS),
]


@pytest.mark.skipif(NO_LIBAIO, reason="needs libaio-dev")
def test_offload_to_nvme_is_tested_here():
    assert NVME


@pytest.mark.parametrize("cell", START_CASES, ids=str)
def test_every_rank_starts_from_the_baselines_weights_bit_for_bit(seen, cell):
    """In bf16 this holds for the masters too: they start as the rounded weights, as in the baseline."""
    for facts in seen(cell).ranks:
        assert facts["missing"] == []
        assert facts["wrong"] == []


@pytest.mark.parametrize(("cell", "parts"), BUILT_IN_PARTS, ids=str)
def test_no_rank_ever_holds_the_whole_model_while_it_is_built(seen, cell, parts):
    """A rank holds at most its part and three copies of one parameter, for example drawn, rounded and split."""
    for facts in seen(cell).ranks:
        whole, largest = facts["whole"], facts["largest"]
        shared = largest if "pipeline" in cell.name else 0  # both ends of a pipeline hold the embedding
        buffers = 5 * largest / parts if "nvme" in cell.name else 0  # to swap through
        assert whole / (2 * parts) < facts["most_while_built"] - buffers <= whole / parts + shared + 3 * largest < whole


@pytest.mark.parametrize(("cell", "parts"), [case for case in BUILT_IN_PARTS if "steps" in case[0].name], ids=str)
def test_a_rank_trains_only_its_part(seen, cell, parts):
    """Between steps it keeps its stage or shard, and biases and LayerNorms, which are too small to split."""
    for facts in seen(cell).ranks:
        shared = facts["largest"] if "pipeline" in cell.name else 0
        assert facts["whole"] / parts <= facts["held"] <= 1.1 * facts["whole"] / parts + shared


# Dropout under every way to split a model: ranks draw different masks exactly where their activations differ.


SPLIT_CASES = [
    *(Asked(2, f"steps {name}") for name in (*REPLICAS, "zero3", *SPLIT)),
    *(Asked(4, f"steps {name}") for name in SPLIT),
    *(Asked(8, f"steps {name}") for name in (THREE_D, SUMMED_BY_STAGES)),
]


def activations(facts):
    """Equal for ranks that compute the same activations."""
    return facts["place"]["stage"], facts["place"]["data"], facts["place"]["sequence"]


def of_attention(shape):
    return len(shape) == 4  # (B, heads, T, T)


@pytest.mark.parametrize("cell", SPLIT_CASES, ids=str)
def test_masks_are_the_ranks_own(seen, cell):
    """Ranks with different data, stages or positions have no mask in common."""
    for one, two in itertools.combinations(seen(cell).ranks, 2):
        masks = [{digest for _, digest in facts["masks"]} for facts in (one, two)]
        assert all(masks)
        if activations(one) != activations(two):
            assert not masks[0] & masks[1]


@pytest.mark.parametrize("cell", [cell for cell in SPLIT_CASES if "tensor2" in cell.name], ids=str)
def test_tensor_peers_share_masks_of_shared_activations(seen, cell):
    """They drop the same elements of activations that both hold; their different heads have different masks."""
    pairs = itertools.combinations(seen(cell).ranks, 2)
    peers = [(one, two) for one, two in pairs if activations(one) == activations(two)]
    assert len(peers) == cell.ranks // 2
    for one, two in peers:
        assert any(of_attention(shape) for shape, _ in one["masks"])
        for (shape, digest), (other_shape, other_digest) in zip(one["masks"], two["masks"], strict=True):
            assert shape == other_shape
            assert (digest == other_digest) == (not of_attention(shape))


@pytest.mark.parametrize("cell", SPLIT_CASES, ids=str)
def test_replicated_weights_stay_equal(seen, cell):
    """After steps with dropout, ranks that hold the same weight hold the same bits."""
    ranks = seen(cell).ranks
    for one, two in itertools.combinations(ranks, 2):
        same = one["replicas"].keys() & two["replicas"].keys()
        assert all(one["replicas"][name] == two["replicas"][name] for name in same)
        assert same or "pipeline" in cell.name or "fsdp" in cell.name
    for facts in ranks:
        assert len(facts["unchanged"]) <= len(facts["replicas"]) / 2


@pytest.mark.parametrize(
    ("cell", "straight"),
    [
        (Asked(ranks, f"recomputed {name}"), Asked(ranks, f"run {name}"))
        for ranks, names in ((2, RECOMPUTED), (4, [SUMMED_BY_MANY]))
        for name in names
    ],
    ids=str,
)
def test_recomputed_activations_have_the_same_dropout_masks(seen, cell, straight):
    """With other masks in the second computation, the gradients would belong to another loss."""
    plain, again = (seen(one) for one in (straight, cell))
    assert {facts["exit"] for one in (plain, again) for facts in one.ranks} == {0}
    compared = [(line["loss"], line["grad_norm"]) for line in read_lines(again.run)]
    assert compared == [(line["loss"], line["grad_norm"]) for line in read_lines(plain.run)]
    assert len(compared) == 4


# DDP and FSDP in fp16, beside the baseline, and in ways that the parity suite does not have.


in_both = pytest.mark.parametrize("cell", [Asked(2, f"torch {name}") for name in REPLICAS], ids=str)


@in_both
def test_fp16_trains_as_the_baseline_does(seen, cell):
    """The smallest gradients have few digits, so the text decides: 2e-5 on that of Python 3.13.

    The other bounds are far below the difference between precisions.
    """
    for facts in seen(cell).ranks:
        assert facts["gradient"] <= 6e-5
        for one, two in zip(facts["baseline"]["steps"], facts["fp16"]["steps"], strict=True):
            assert two[0] == pytest.approx(one[0], abs=1e-5)
            assert two[1] == pytest.approx(one[1], rel=1e-4)


@in_both
def test_all_ranks_skip_the_same_steps(seen, cell):
    """Each has the same loss scale afterwards: 2**22, halved once per skipped step."""
    one, two = (facts["overflowing"] for facts in seen(cell).ranks)
    skipped = [norm is None for _, norm in one["steps"]]
    assert skipped[0] and not skipped[-1]
    assert one["scale"] == 2.0 ** (22 - sum(skipped))
    assert (two["steps"], two["scale"]) == (one["steps"], one["scale"])


@in_both
def test_it_trains_the_same_when_compiled(seen, cell):
    """PyTorch's own way of splitting compiled graphs fails with DDP's buckets under 1 MiB, as here."""
    facts = seen(cell).ranks[0]
    for one, two in zip(facts["fp32"]["steps"], facts["compiled"]["steps"], strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("cell", [Asked(2, f"graphs {name}") for name in COMPILED], ids=str)
def test_a_compiled_block_is_one_graph_and_keeps_no_weights_that_zero_3_gathered(seen, cell):
    """DeepSpeed keeps the last weights for the backward pass; a block that saved its weights would keep all of them."""
    for facts in seen(cell).ranks:
        assert facts["losses"] == pytest.approx(seen(cell).ranks[0]["losses"])
        if "zero3" in cell.name:
            assert facts["alive"] < 0.5


@pytest.mark.parametrize("cell", [Asked(2, "torch ddp")], ids=str)
def test_small_buckets_send_the_same_in_more_calls(seen, cell):
    facts = seen(cell).ranks[0]
    usual, small = facts["bf16"], facts["fine"]
    (calls, payload_bytes), (more_calls, same_bytes) = (each["traffic"]["all_reduce"] for each in (usual, small))
    assert calls == 2  # one bucket, into which everything fits, and the loss
    assert more_calls > 4
    assert same_bytes == payload_bytes
    assert small["steps"] == usual["steps"]


@pytest.mark.parametrize("cell", [Asked(2, "torch fsdp")], ids=str)
def test_a_reduction_in_low_precision_sends_half_the_bytes_and_rounds(seen, cell):
    facts = seen(cell).ranks[0]
    usual, low = facts["bf16"], facts["fine"]
    calls, payload_bytes = usual["traffic"]["reduce_scatter"]
    assert low["traffic"]["reduce_scatter"] == [calls, payload_bytes / 2]
    for one, two in zip(usual["steps"], low["steps"], strict=True):
        assert two == pytest.approx(one, rel=1e-2)
        assert two[1] != one[1]


# Every rank knows the mean loss of what it read.


@pytest.mark.parametrize("cell", SPLIT_CASES, ids=str)
def test_the_loss_is_the_mean_over_what_ranks_read(seen, cell):
    """Stages and tensor peers read the same. Ranks with other data or positions have another loss."""
    ranks = seen(cell).ranks
    for step in range(len(ranks[0]["losses"])):
        own = {(facts["place"]["data"], facts["place"]["sequence"]): facts["losses"][step][1] for facts in ranks}
        assert sum(own.values()) / len(own) == pytest.approx(ranks[0]["losses"][step][0], abs=1e-5)
        assert len({round(loss, 4) for loss in own.values()}) == len(own)
        for facts in ranks:
            place = facts["place"]["data"], facts["place"]["sequence"]
            assert facts["losses"][step][1] == pytest.approx(own[place], abs=1e-5)
            assert math.isfinite(facts["gradients"][step] or 0.0)
            split = any(way in cell.name for way in ("pipeline", "tensor", "sequence"))
            assert (facts["gradients"][step] is None) == split  # it would have passed other ranks


# Resumed runs are equal bit for bit, follow a new recipe if one is given, and stop on a full disk.


LAST = "step-00000004"


@pytest.mark.parametrize(
    "cell",
    [
        *(Asked(2, f"resumed {name}") for name in (*RESUMED, *SAVED_BESIDE)),
        Asked(4, f"resumed {SUMMED_BY_MANY}"),
        Asked(8, f"resumed {THREE_D}"),
    ],
    ids=str,
)
def test_a_killed_run_with_dropout_resumes_bit_for_bit(seen, cell):
    end = seen(cell)
    assert [facts["exit"] for facts in end.ranks] == [0] * cell.ranks
    straight = end.run.with_name("run")
    assert len(steps_of(straight)) == 4
    assert steps_of(end.run) == steps_of(straight)
    assert json.loads((end.run / "training_metrics.json").read_text())["resumed_from"] == "step-00000002"
    ours, theirs = (StateReader(run / LAST) for run in (end.run, straight))
    for name in theirs.shapes:
        assert all(one.equal(two) for one, two in zip(ours.state(name)[:3], theirs.state(name)[:3], strict=True)), name
    assert not list(end.run.glob("nvme-swap-*"))


@pytest.mark.parametrize("cell", [Asked(2, f"checkpoint {name}") for name in SPLIT_STATE], ids=str)
def test_no_rank_ever_holds_the_whole_state_of_training(seen, cell):
    """It writes what it has, without a copy, and with async it copies its part once.

    While it reads, it holds a parameter, and the new moments of its part.
    """
    for rank, facts in enumerate(seen(cell).ranks):
        whole, largest = facts["whole"], facts["largest"]
        assert facts["moments"]
        assert facts["parts"] == (1 if rank else cell.ranks)  # of the index, which is large with many ranks
        # The lowest and the highest weight, and of 76 parameters a byte: whether they are finite.
        assert max(facts["most_while_saved"], facts["most_while_written"]) <= 10 + 76 / 4
        assert 2.9 * facts["own"] < facts["most_while_kept"] <= 3 * facts["own"]  # without the last small ones
        assert largest <= facts["most_while_loaded"] <= 2 * whole / cell.ranks + 6 * largest < 2 * whole


@pytest.fixture(scope="module")
def baselines(tmp_path_factory, corpus) -> dict[str, Path]:
    """The same runs in plain PyTorch: with the first recipe alone, and with the changed one from step 2 on."""
    folder = tmp_path_factory.mktemp("baseline")
    runs = {}
    for name in ("before the change zero1", "changed zero1"):
        cell = CELLS[2][name]
        recipe_of(cell, 1, folder / f"{name}.json")
        run = folder / ("killed" if cell.after else "run")
        assert train(["--run_type", "baseline", *cell.words(corpus, folder / f"{name}.json", run)]) == 0
        if not cell.after:
            roll_back(run, folder / "killed", 2)
        runs[name.split()[0]] = run
    return runs


@pytest.mark.parametrize("cell", [Asked(2, f"changed {name}") for name in CHANGED_STRATEGIES], ids=str)
def test_a_resumed_run_uses_the_new_recipes_settings(seen, baselines, cell):
    """Betas, weight decay and clipping of the new recipe act under every strategy, as under plain PyTorch."""
    end = seen(cell)
    assert [facts["exit"] for facts in end.ranks] == [0, 0]
    expected, other = (weights_of(baselines[name] / LAST) for name in ("changed", "before"))
    for name, value in weights_of(end.run / LAST).items():
        off = torch.linalg.vector_norm(value - expected[name]) / torch.linalg.vector_norm(expected[name])
        assert off <= 1e-3, name
    for one, two in zip(steps_of(baselines["changed"]), steps_of(end.run), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert torch.linalg.vector_norm(other["wte.weight"] - expected["wte.weight"]) > 0.05 * torch.linalg.vector_norm(
        expected["wte.weight"]
    )


FULL = [
    *((f"full disk of main {name}", 0) for name in FULL_DISK),
    *((f"full disk of {of} {FULL_DISK[0]}", 1) for of in ("last", "beside")),
]


@pytest.mark.parametrize(("cell", "who"), [(Asked(2, name), who) for name, who in FULL], ids=str)
def test_a_disk_that_is_full_for_one_rank_ends_all_ranks(seen, cell, who):
    """Neither rank waits for the other, both print the reason, and no file of the attempt is left."""
    end = seen(cell)
    assert [facts["exit"] for facts in end.ranks] == [EXIT_NOT_SAVED] * 2
    for rank in range(2):
        (line,) = [line for line in end.log(rank).splitlines() if line.startswith("error: ")]
        assert f"not saved: rank {who}: " in line
        assert "File too large" in line
    assert not list(end.run.glob("*step-*"))
    assert not list(end.run.glob("nvme-swap-*"))
