"""The chunks of ``benchmark.py gpu``: what each measures, in a process of its own, and what it calls wrong.

``python -m dsgpt.benchmarks.gpu_chunks JOB`` runs one. Most start another suite with ``--device cuda`` and read its
record. A *failure* is wrong: a loss, a peak, a wait, an output. A *finding* is a goal that was missed, such as a speed.
"""

import atexit
import bisect
import contextlib
import gzip
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import cells, frame, launch, plan, speed, sweep, sweep_cells
from dsgpt.benchmarks.resume import read_losses
from dsgpt.benchmarks.suites import suite_of
from dsgpt.common.command_line import run_script
from dsgpt.common.errors import EXIT_STOPPED, UserError
from dsgpt.common.files import write_atomic, write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.common.text import REPOSITORY, largest_divisor
from dsgpt.config.recipe import sound_recipe
from dsgpt.machine.launcher import launcher_command
from dsgpt.model.config import PRESETS
from dsgpt.planner.formulas import FIXED_BYTES, peak_memory
from dsgpt.planner.options import HEADROOM
from dsgpt.planner.rates import utilisation
from dsgpt.planner.setup import Setup
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, finite, read_steps
from dsgpt.record.suites import State, strategy_of

RECIPE = "ds_configs/zero1.json"
ON_GPU = ("baseline", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")
SPLIT = ("tensor", "pipeline", "sequence", "3d")
OFFLOADED = ("zero2-offload", "zero3-offload")
"""Strategies whose optimizer DeepSpeed compiles for the host when it is first used, which takes minutes."""
LENGTH, IDS = 1024, 4_000_000
"""Tokens of a sequence of the published models, and random ids to train them on."""
STEPS = 20
LOSS_BOUND = {"fp32": 2e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Bound on the distance of a step's loss from that of a CPU in fp32, over ``STEPS`` steps: nats per token. A 16-bit
precision rounds every product; a step that is taken twice, or with another rate, differs by more than 0.1."""
SAME_LOSS = 3e-3
"""Bound on the distance between strategies in one 16-bit precision, which round in other places."""
_ZERO_WAITS = {"zero0": 36, "zero1": 3, "zero2": 6, "zero3": 6, "zero2-offload": 8, "zero3-offload": 11}
WAITS: Mapping[str, Mapping[str, int]] = {
    "bf16": _ZERO_WAITS,
    "fp16": _ZERO_WAITS | {"baseline": 1, "ddp": 1, "fsdp": 1, "zero1": 6, "zero3": 7, "zero3-offload": 13},
}
"""Times that the host waits for a stand-in GPU in a step of each cell of ``plan.WAITS``, by precision and strategy; 0
where there is none. ZeRO-0 waits for the norm of each gradient."""
FASTER: Mapping[str, tuple[str, ...]] = {
    "compiled": ("--compile",),
    "padded logits": ("--pad_logits",),
    "CUDA graphs": ("--compile", "--cuda_graphs"),
}
"""Options that are to make a step faster: name and flags. Graphs are captured of the baseline alone."""
MEMORY = 80 << 30
"""Bytes of a stand-in GPU."""
LONGEST_SEC = 570
"""Longest time of a training or of a suite of a chunk."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a chunk found."""

    lines: Sequence[str]
    """Its figures for readers, in Markdown."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs; the record of a suite."""
    failures: Sequence[str] = ()
    findings: Sequence[str] = ()
    headline: Mapping[str, float | None] = field(default_factory=dict)
    """Figures that stand beside published ones, by the keys of ``gpu.PUBLISHED``."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The means of a chunk."""

    folder: Path
    """Exists, with nothing of the chunk in it."""
    gpus: int
    """GPUs that it uses."""
    stand_in: bool
    """Whether the GPUs are stand-ins: then models are small, and nothing is compiled."""
    peers: Sequence[str] = ()
    """As of ``--peer``."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """As of a record."""
    repository: Path = REPOSITORY

    @cached_property
    def text(self) -> cells.Corpus:
        """A small text, prepared when it is first needed."""
        return cells.prepare_corpus(self.repository, self.folder / "text")

    def ids(self, vocabulary: int, *, count: int = IDS) -> dict[str, Any]:
        """The flags of ``count`` random ids."""
        cells.write_random_tokens(self.folder / "ids", vocab_sizes=(vocabulary,), count=count)
        return dict.fromkeys(("train_data_path", "val_data_path"), self.folder / "ids" / f"{vocabulary}.bin")

    @cached_property
    def published(self) -> dict[str, Any]:
        """Flags of GPT-2 small at its full length, on random ids; under the stand-in of the smallest model, on text."""
        if self.stand_in:
            return {**cells.shape("cuda"), "train_data_path": self.text.train, "val_data_path": self.text.val}
        return {"model_size": "small", "seq_length": LENGTH, **self.ids(PRESETS["small"].vocab_size)}

    def record(self, name: str, *words: object) -> frame.Record:
        """The record of ``benchmark.py NAME --device cuda``.

        Raises:
            UserError: it wrote none; with the last line that it printed.
        """
        output, log = self.folder / name / f"{name}.json", self.folder / f"{name}.txt"
        peers = ["--peer", *self.peers] if self.peers and name in {"speed", "decoding"} else []
        command = [sys.executable, "src/benchmark.py", name, *map(str, words), *peers]
        command += ["--device", "cuda", "--output", str(output)]
        with log.open("ab") as printed:
            streams: dict[str, Any] = {"stdout": printed, "stderr": printed}
            done = subprocess.run(command, cwd=self.repository, env=launch.child_environment(), check=False, **streams)
        if not output.exists():
            said = log.read_text(encoding="utf-8", errors="replace").strip() or "it printed nothing"
            raise UserError(f"benchmark.py {name} ended with {done.returncode}: {said.splitlines()[-1]}")
        return read_object(output, max_bytes=frame.MAX_BYTES)

    def suite(self, name: str, *words: object, goals: str = "$^") -> Found:
        """What a suite found; failures of it that match the pattern ``goals`` are findings."""
        record, kind = self.record(name, *words), suite_of(name)
        said = kind(kind.flags(), self.repository).failures(record)
        missed = [line for line in said if re.search(goals, line)]
        wrong = [line for line in said if line not in missed]
        lines = kind.summary(record)
        shown = lines if any(line.startswith("|") for line in lines) else [f"* {line}" for line in lines]
        return Found(lines=shown, figures=record, failures=wrong, findings=missed)

    def trained(self, suite: sweep_cells.SweepPlan, *words: object, **flags: object) -> Found:
        """Train the cells of a sweep with ``flags`` besides, and compare them; without comparisons, with the first."""
        described = {key: value for key, value in asdict(suite).items() if value and key != "name"}
        described |= {"schema_version": "1.0", "flags": launch.training_words(flags)}
        write_json_atomic(self.folder / "suite.json", described)
        limits = ("--repeats", 1, "--limit", LONGEST_SEC)
        record = self.record("run", "--suite", self.folder / "suite.json", *limits, *words)
        ended = [(cell["name"], turn) for cell in record["cells"] for turn in cell["turns"]]
        wrong = [f"{name}: {turn['state']}: {turn['message']}" for name, turn in ended if turn["state"] != State.DONE]
        same = [comparison["cells"] for comparison in record["comparisons"] if comparison["kind"] == "same training"]
        compared = {one["cell"]: one["largest_loss_difference"] for cells in same for one in cells}
        if not compared:
            wrong.append("nothing is compared")
        wrong += [f"{name}: its losses are compared with none" for name, off in compared.items() if off is None]
        far = {name: off for name, off in compared.items() if off is not None}
        lines = [f"* {line}" for line in suite_of("run").summary(record)]
        lines += [f"* {name}: a loss is at most {off:.1e} off" for name, off in far.items()]
        wrong += [f"{name}: a loss is off by {off:.1e}" for name, off in far.items() if not off <= SAME_LOSS]
        return Found(lines=lines, figures=record, failures=wrong)

    def training(
        self, name: str, *, launcher: str = "python", ranks: int = 1, **flags: object
    ) -> tuple[list[str], Path]:
        """The command of a training of the smallest model on the text, with ``flags`` besides, and its run folder."""
        run_dir = self.folder / name
        values = {
            "run_type": "baseline",
            **cells.file_values(self.text, recipe=self.repository / RECIPE, run_dir=run_dir),
            **(cells.shape("cuda") if "model_size" not in flags else {}),
            **{"max_train_steps": STEPS, "max_val_steps": 1, "save_every": 0, "steps_per_print": 1},
            **{"device": "cuda", "no_inference": True},
            **flags,
        }
        script = str(self.repository / "src" / "gpt2.py")
        return [*launcher_command(launcher, ranks), script, *launch.training_words(values)], run_dir

    def train(self, name: str, *, may_fail: bool = False, **flags: Any) -> tuple[sweep.Ending, Path]:
        """Run such a training to its end.

        Raises:
            UserError: it failed, and may not.
        """
        command, run_dir = self.training(name, **flags)
        log, device = self.folder / f"{name}.txt", str(flags.get("device", "cuda"))
        ending = sweep.train(command, log=log, limit_sec=LONGEST_SEC, cwd=self.repository, device=device)
        if ending.state != State.DONE and not may_fail:
            raise UserError(f"{name}: {ending.state}: {ending.message}")
        return ending, run_dir


# The chunks, in the order in which they run.


def smoke(proof: Proof) -> Found:
    """Every strategy takes some steps, under the launchers that users use.

    Every training ends, and no loss is more than 0.003 nats from the baseline's.
    """
    return _strategies(proof, ("baseline", "fsdp", "zero1", "tensor") if proof.stand_in else (*ON_GPU, *SPLIT))


def offload(proof: Proof) -> Found:
    """The strategies with an optimizer in the host take some steps, after its operator was compiled.

    Every training ends, and no loss is more than 0.003 nats from the baseline's.
    """
    return _strategies(proof, ("baseline", *OFFLOADED))


def _strategies(proof: Proof, names: Sequence[str]) -> Found:
    suite = sweep_cells.built_in("strategies", devices=(largest_divisor(sweep_cells.BATCH, at_most=proof.gpus),))
    chosen = tuple(cell for cell in suite.cells if strategy_of(cell.name) in names)
    data = {"train_data_path": proof.text.train, "val_data_path": proof.text.val}
    found = proof.trained(replace(suite, cells=chosen, comparisons=()), "--steps", 4, **cells.shape("cuda"), **data)
    absent = [name for name in names if name not in {strategy_of(cell.name) for cell in chosen}]
    return replace(found, lines=[*found.lines, *(f"* {name} needs more GPUs" for name in absent)])


def parity_of_all(proof: Proof) -> Found:
    """Every strategy on two GPUs against plain PyTorch on one: losses, gradients, weights.

    The bounds of the parity suite.
    """
    names = ("zero2",) if proof.stand_in else (*ON_GPU[1:], *SPLIT)
    return proof.suite("parity", "--core", "--ranks", 2, "--only", *names)


def parity(proof: Proof) -> Found:
    """Every strategy on one GPU against plain PyTorch, and plain PyTorch in each precision against a CPU in fp32.

    The bounds of the parity suite; losses in fp32 are within 2e-4 nats of a CPU's, in 16 bits within 0.03.
    """
    names = ("baseline",) if proof.stand_in else ON_GPU
    found = proof.suite("parity", "--core", "--ranks", 1, "--only", *names)
    expected = read_losses(proof.train("cpu", device="cpu", precision="fp32")[1], "loss")
    lines, failures = [], []
    for precision, bound in LOSS_BOUND.items():
        losses = read_losses(proof.train(precision, precision=precision)[1], "loss")
        off = max(abs(losses[step] - expected[step]) for step in expected)
        lines.append(f"* plain PyTorch in {precision}: a loss is at most {off:.1e} from that of a CPU in fp32")
        failures += [] if off <= bound else [f"{precision}: a loss is {off:.1e} from a CPU's in fp32"]
    return replace(found, lines=[*found.lines, "", *lines], failures=[*found.failures, *failures])


def memory(proof: Proof) -> Found:
    """The peak of a step, up to the end of its forward pass and after it, against the planner.

    A predicted peak is at most 10% over and 3% under the measured one.
    """
    found = _planned(proof, plan.MEMORY)
    return replace(found, failures=[why for cell in found.figures["cells"] for why in plan.failed(cell)])


def waits(proof: Proof) -> Found:
    """How often the host waits for the GPU in a step without logging.

    No more often than for a stand-in GPU.
    """
    found = _planned(proof, plan.WAITS)
    done = [cell for cell in found.figures["cells"] if cell["status"] == "done"]
    more = [one for one in done if one["waits"] > WAITS[one["work"]["precision"]].get(one["strategy"], 0)]
    return replace(found, failures=[*found.failures, *(f"{one['title']}: waits {one['waits']} times" for one in more)])


def steps(proof: Proof) -> Found:
    """Steps beside those that a calibration of this machine predicts.

    Every cell ends; a step that was not fitted and is 30% off is a finding.
    """
    found = _planned(proof, plan.STEPS, "--rounds", 2)
    times = [(cell["title"], cell.get("step_seconds", {})) for cell in found.figures["cells"] if not cell["fit"]]
    off = [(title, each["predicted"] / each["measured"] - 1) for title, each in times if each.get("predicted")]
    far = [f"{title}: predicted {each:+.0%}" for title, each in off if abs(each) > plan.MOST_OFF_TIME]
    return replace(found, findings=far, lines=[*found.lines, *(f"* {title}: step {each:+.0%}" for title, each in off)])


def _planned(proof: Proof, group: str, *words: object) -> Found:
    """Cells of ``group`` by ``benchmark.py plan``; those that end with an error fail. The stand-in has small ones."""
    chosen, suite = plan.gpu_cells(proof.gpus)[group], plan.Plan(plan.PlanOptions(), proof.repository)
    if proof.stand_in:  # of the strategies whose memory is as planned for small models, too
        chosen = [cell for cell in plan.gpu_cells(1)[plan.WAITS] if cell.strategy in {"baseline", "fsdp"}]
    record = proof.record("plan", *(words or ("--rounds", 0)), "--only", *(cell.key for cell in chosen))
    lines = [suite.line(cell, count="*", left=f"; waits {cell.get('waits')}") for cell in record["cells"]]
    wrong = [f"{cell['title']}: {cell['message']}" for cell in record["cells"] if cell["status"] != "done"]
    return Found(lines=lines, figures=record, failures=wrong)


def truth(proof: Proof) -> Found:
    """The record of a training against itself, the driver and the GPU.

    Each line holds.
    """
    started = time.perf_counter()
    _, run = proof.train("run", max_train_steps=60, monitor_every=0.2, save_every=20, **proof.published)
    wall = time.perf_counter() - started
    record, lines = read_object(run / RECORD_FILE), [line for line in read_steps(run / STEPS_FILE) if "loss" in line]
    summary, memory = record["summary"], record["hardware"]["gpu_memory_bytes"]
    own_wall = summary["total_wall_time_sec"]
    stepped = sum(line["step_time_sec"] for line in lines[1:])
    between = [line for line in lines if 25 <= line["step"] < 40]  # without a save
    elapsed, timed = between[-1]["wall_time_sec"] - between[0]["wall_time_sec"], between[1:]
    shown, least = sum(line["step_time_sec"] for line in timed), 0.5 if proof.stand_in else 0.9
    allocated, reserved = (summary[f"max_cuda_mem_{kind}_bytes_rank0"] for kind in ("allocated", "reserved"))
    held = record["cost"]["model_state_bytes_per_rank"]["by_device"].get("cuda", 0)
    sizes, use = (held, allocated, reserved, memory), (summary["gpu_use"] or {}).get("gpus", [None])[0]
    facts: dict[str, tuple[bool, object]] = {
        "the steps take the time that passes, s": (least * elapsed < shown <= 1.02 * elapsed, (shown, elapsed)),
        "steps and run take less than the process, s": (stepped <= own_wall <= wall, (stepped, own_wall, wall)),
        "state, allocated, reserved and memory grow": (held <= allocated <= reserved <= memory, sizes),
        "the driver answers": (use is not None or proof.stand_in, use),
    }
    if use is not None:
        by_power = use["power_watts_mean"] * 0.2 * use["samples"]
        facts |= {
            "the driver counts what torch reserves": (use["memory_used_bytes_max"] >= reserved, reserved),
            "energy is the sum of power, J": (0.6 < use["energy_joules"] / by_power < 1.6, by_power),
            "MFU is a share": (summary["mfu"] is None or 0 < summary["mfu"] < 1, summary["mfu"]),
        }
    said = [f"{'' if true else 'NOT '}{what}: {value}" for what, (true, value) in facts.items()]
    wrong = [line for line in said if line.startswith("NOT ")]
    return Found(lines=[f"* {line}" for line in said], failures=wrong, figures={"summary": summary})


def speed_of_small(proof: Proof) -> Found:
    """Tokens per second and the share of the GPU's peak of GPT-2 small, beside other trainers.

    Every trainer ends; a missed goal is a finding.
    """
    return _speeds(proof, "4-x-256") if proof.stand_in else _speeds(proof, "small", "zero-1")


def speed_of_medium(proof: Proof) -> Found:
    """Tokens per second and the share of the GPU's peak of GPT-2 medium, beside other trainers.

    Every trainer ends; a missed goal is a finding.
    """
    return _speeds(proof, "4-x-256" if proof.stand_in else "medium")


def _speeds(proof: Proof, *keys: str) -> Found:
    record = proof.record("speed", "--rounds", 1 if proof.stand_in else 3, "--only", *keys)
    lines, headline = [], dict[str, float | None]()
    for result in record["results"]:
        lines.append(f"* {speed.verdict(result)}")
        if "entries" not in result:
            continue
        work, (ours, *others) = result["work"], result["entries"]
        model = PRESETS.get(work["shape"]["name"]) or speed.NARROW.config(work["shape"]["length"])
        of_one, facts = {**record["hardware"], "world_size": 1}, {"seq_length": work["shape"]["length"]}
        own = ours["tokens_per_sec"]["median"]
        mfu = utilisation(model, of_one, precision=work["precision"], **facts).mfu(own)
        lines[-1] += f"; {own:,.0f} tokens/s{'' if mfu is None else f', MFU {mfu:.1%}'}"
        if work["shape"]["name"] == "small" and work["compile"] and ours["kind"] == speed.OURS:
            beside = [entry["tokens_per_sec"]["values"] for entry in others if entry["kind"] == frame.NANOGPT]
            ratio = frame.ratios(ours["tokens_per_sec"]["values"], beside[0])["median"] if beside else None
            headline = {"mfu of small": mfu, "beside nanoGPT": ratio}
    failed = [speed.verdict(result) for result in record["results"] if "failed" in result]
    missed = [speed.verdict(result) for result in record["results"] if speed.reached(result) is False]
    findings = [line for line in missed if line not in failed]
    return Found(lines=lines, figures=record, failures=failed, findings=findings, headline=headline)


def decoding(proof: Proof) -> Found:
    """Seconds of generated tokens with a compiled step, beside transformers.

    In fp32 the ids are those of transformers; a missed goal is a finding.
    """
    words = ["demo", "--rounds", 1, "--only", "fp32"] if proof.stand_in else ["small", "--rounds", 3, "--compiled"]
    return proof.suite("decoding", "--model_size", *words, goals="slower than|farther from")


def saved(proof: Proof) -> Found:
    """Checkpoints: written again by every strategy, and stopped by SIGTERM on a GPU or a CPU and resumed on the other.

    What is written again is equal bit for bit. Losses of a resumed run are within 2e-4 nats of an undisturbed one's.
    """
    found = proof.suite("resume", "--core")
    flags: dict[str, Any] = {"precision": "fp32", "max_train_steps": 60, "save_every": 1}
    expected, rewritten = read_losses(proof.train("whole", **flags)[1], "loss"), found.figures["rewritten"]
    lines = [f"* {one['name']}: {one['status']}" for one in rewritten]
    failures = [] if rewritten else ["no checkpoint was written again"]
    failures += [f"{one['name']} is refused" for one in rewritten if one["status"] == "refused"]
    for first, then in (("cuda", "cpu"), ("cpu", "cuda")):
        command, run = proof.training(name := f"{first} to {then}", **flags | {"device": first})
        until = time.monotonic() + 120
        printed = (proof.folder / f"{name}.txt").open("wb")
        with printed as log, launch.own_group(command, log, cwd=proof.repository, device=first) as process:
            while process.poll() is None and not ((run / "latest").exists() or time.monotonic() > until):
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=120)
        at = max(read_losses(run, "loss"), default=0)
        proof.train(name, **flags | {"device": then}, resume=True)
        losses = read_losses(run, "loss")
        off = max(abs(losses[step] - expected[step]) for step in expected)
        lines.append(f"* {name}: SIGTERM ended it with {code} after step {at}; a loss is off by {off:.1e}")
        failures += [] if code == EXIT_STOPPED and off <= LOSS_BOUND["fp32"] else [lines[-1].removeprefix("* ")]
    return replace(found, lines=lines, failures=[*found.failures, *failures])


def profile(proof: Proof) -> Found:
    """Traces and communication of some steps of DDP, on every rank.

    Every trace has kernels of the GPU, with several GPUs an all-reduce of NCCL, and no kernel of NCCL that is unknown.
    """
    from dsgpt.telemetry import profiles  # noqa: PLC0415 - torch takes seconds

    flags: dict[str, Any] = {"run_type": "ddp", "launcher": "torchrun", "ranks": proof.gpus}
    _, run = proof.train("run", profile=3, profile_comm=3, **flags, **proof.published)
    measured, lines, failures = read_object(run / profiles.COMMUNICATION_FILE), [], []
    for rank, own in enumerate(measured["ranks"]):
        with gzip.open(run / profiles.PROFILE_FOLDER / profiles.trace_file(rank), "rt") as trace:
            kernels = sum(event.get("cat") == "kernel" for event in json.load(trace)["traceEvents"])
        share, operations = own["exposed_share"], [op["op"] for op in own["by_op"]]
        lines.append(f"* rank {rank}: {share:.1%} of a step exposed; {operations}; {kernels} kernels in the trace")
        seen = proof.stand_in or (kernels and (proof.gpus == 1 or "all_reduce" in operations))
        if not seen or not 0 <= share <= 1 or profiles.OTHER in operations:
            failures.append(lines[-1].removeprefix("* "))
    if len(lines) != proof.gpus or measured["backend"] != "nccl":
        failures.append(f"{len(lines)} of {proof.gpus} ranks, backend {measured['backend']}")
    return Found(lines=lines, figures=measured, failures=failures)


def fit(proof: Proof) -> Found:
    """The largest micro batch that is planned to fit, and the smallest whose tensors alone need more than there is.

    The first trains; the second runs out of memory.
    """
    model, length, memory = PRESETS["small"], LENGTH, int(proof.hardware["gpu_memory_bytes"])
    if proof.stand_in:
        model, length, memory = cells.NARROW.config(256), 256, 800_000_000
        install_stand_in(proof.folder, gpus=1, memory=memory)
    precision, recipe = "fp32" if proof.stand_in else "bf16", sound_recipe(proof.repository / RECIPE)
    work: dict[str, Any] = {"run_type": "baseline", "seq_length": length, "precision": precision}

    def peak(micro: int) -> int:
        batch: dict[str, Any] = {"micro_batch_size": micro, "gradient_accumulation_steps": 1}
        planned = Setup(model=model, recipe=recipe, world_size=1, activation_checkpointing=False, **work, **batch)
        return peak_memory(planned, device="cuda").total

    sizes, usable = range(1, 1 << 14), (1 - HEADROOM / 100) * memory - FIXED_BYTES["cuda"]
    too_much = memory * (1 + plan.MOST_OFF)
    planned, beyond = bisect.bisect_right(sizes, usable, key=peak), bisect.bisect_right(sizes, too_much, key=peak) + 1
    flags = work | launch.shape_values(model) | proof.ids(model.vocab_size, count=(beyond + 1) * length)
    lines, failures = [], []
    for micro, expected in ((planned, State.DONE), (beyond, State.OUT_OF_MEMORY)):
        batch = {"global_batch_size": micro, "micro_batch_size_per_gpu": micro, "max_train_steps": 4}
        ending, _ = proof.train(f"micro-{micro}", may_fail=True, model_size="small", **flags | batch)
        lines.append(f"* micro batch {micro}, planned with {peak(micro) / 1e9:.2f} GB: {ending.state}")
        failures += [] if ending.state == expected else [f"{lines[-1].removeprefix('* ')}: {ending.message}"]
    return Found(lines=lines, failures=failures)


def server(proof: Proof) -> Found:
    """A server under four times the requests that it can answer.

    Every request is answered once, with the right text, and its memory does not grow.
    """
    _, run = proof.train("model", max_train_steps=3, model_size="demo" if proof.stand_in else "small", seq_length=128)
    requests = ["--requests", 20, "--rounds", 1] if proof.stand_in else ["--requests", 300, "--rounds", 2]
    return proof.suite("serving", "--checkpoint", run, *requests, goals="^the load was only")


def faster(proof: Proof) -> Found:
    """What each option gains in bf16.

    Every training ends. An option is kept only if its losses are those without it.
    """
    suite = sweep_cells.built_in("strategies", devices=(1,))
    plain = [cell for cell in suite.cells if strategy_of(cell.name) in {"baseline", "zero1"}]
    others = [
        replace(cell, name=f"{cell.name}, {option}", flags=(*cell.flags, *flags))
        for cell in plain
        for option, flags in FASTER.items()
        if strategy_of(cell.name) == "baseline" or "--cuda_graphs" not in flags
    ]
    suite = replace(suite, cells=(*plain, *others), comparisons=())
    found = proof.trained(suite, "--steps", 16, precision="bf16", **proof.published)
    dropped = [line for line in found.failures if "a loss is off" in line]
    wrong = [line for line in found.failures if line not in dropped]
    return replace(found, failures=wrong, findings=[f"not kept: {line}" for line in dropped])


def bus(proof: Proof) -> Found:
    """Bytes per second that every GPU sends in each collective operation.

    Every operation ends.
    """
    from dsgpt.planner.calibrate import measure_ceilings  # noqa: PLC0415 - torch takes seconds

    ceilings = measure_ceilings("cuda", devices=proof.gpus, seconds=0.02 if proof.stand_in else 0.5)
    rates = ceilings["bus_bytes_per_sec"].items()
    lines = [f"* {name} in {kind}: {rate / 1e9:.2f} GB/s" for name, each in rates for kind, rate in each.items()]
    return Found(lines=lines, figures=ceilings)


def scaling(proof: Proof) -> Found:
    """Speed on 1, 2, 4 and 8 GPUs: of the same global batch, and of one that grows with them.

    Every training ends, and of the same batch no loss is more than 0.003 nats from the baseline's.
    """
    suite = sweep_cells.built_in("scaling", devices=[count for count in (1, 2, 4, 8) if count <= proof.gpus])
    found = proof.trained(suite, "--steps", 16, **proof.published)
    compared = [one for comparison in found.figures["comparisons"] for one in comparison["cells"]]
    weak = {one["cell"]: one["efficiency"] for one in compared if "batch" in one["cell"]}
    lines = [f"* {name}: {share:.0%} of the speed of one GPU" for name, share in weak.items() if share is not None]
    most = weak.get(f"{sweep_cells.on_devices('ddp', 8)}, batch {8 * sweep_cells.BATCH}")
    return replace(found, lines=[*found.lines, *lines], headline={"ddp from 1 to 8": most})


# The process of a chunk.


def install_stand_in(folder: Path, *, gpus: int, memory: int) -> None:
    """Give every Python process that this one starts from now on stand-in GPUs of so many bytes.

    Suites start processes under many launchers; each of them executes ``sitecustomize.py`` first.
    """
    code = f"from {__spec__.name} import stand_in\nstand_in(gpus={gpus}, memory={memory})\n"
    write_atomic(folder / "sitecustomize.py", code.encode())
    earlier = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(folder), *filter(None, earlier)]))


def stand_in(*, gpus: int, memory: int) -> None:
    """Give this process stand-in GPUs until it ends, with calibrations that take seconds."""
    import torch  # noqa: PLC0415 - takes seconds, as what follows

    from dsgpt.benchmarks.stand_in_gpu import stand_in_gpu  # noqa: PLC0415
    from dsgpt.planner import calibrate  # noqa: PLC0415

    stack, module_of = contextlib.ExitStack(), torch.get_device_module
    stack.enter_context(stand_in_gpu(gpus=gpus, memory=memory))
    atexit.register(stack.close)
    # transformers names no device
    torch.get_device_module = lambda device=None: module_of(device or "cuda")  # type: ignore[assignment]
    calibrate.TOKENS["cuda"] = 256
    calibrate.WIDTHS["cuda"], calibrate.ROWS["cuda"], calibrate.LENGTHS["cuda"] = (64,), (16, 32, 64), (64,)
    calibrate.MESSAGES["cuda"] = (1 << 12, 1 << 16)
    calibrate.WEIGHT_BYTES["cuda"] = calibrate.ELEMENTS["cuda"] = calibrate.SENT_BYTES["cuda"] = 1 << 16


def machine(_: Proof) -> frame.Record:
    """The head of every record that is made here."""
    return frame.record_head("1.0", device="cuda")


def _end_with(parent: int) -> None:
    """End this process and the suites that it started when ``parent`` is gone: a GPU serves one proof at a time."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGTERM)


def main() -> None:
    """Run the chunk of a job, and write what it found beside the job."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job_file = Path(sys.argv[1])
    job = read_object(job_file)
    proof = Proof(folder=job_file.parent, **job["proof"])
    if proof.gpus == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if proof.stand_in:
        install_stand_in(proof.folder, gpus=proof.gpus, memory=MEMORY)
        stand_in(gpus=proof.gpus, memory=MEMORY)
    found = pkgutil.resolve_name(job["call"])(proof)
    write_json_atomic(proof.folder / "found.json", finite(found if isinstance(found, dict) else asdict(found)))


if __name__ == "__main__":
    run_script(main)
