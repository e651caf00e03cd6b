"""The time until a training reaches a loss: the shipped recipe against the defaults of other trainers.

All train the demo's model on the demo's text for the demo's number of tokens, each with its own default batch, learning
rate and schedule. The loss to reach is the one that nanoGPT has at its end, or Hugging Face's loop without a checkout.
Only training counts, not validation.
"""

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.speed.measure import span
from dsgpt.benchmarks.speed.workloads import HUGGING_FACE, NANOGPT, OURS, Work, published
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic

LENGTH, TOKENS, VALIDATION_WINDOWS = 128, 819_200, 640
"""As in ``make demo``."""
VOCABULARY = 8192
VALIDATIONS = 40
"""Of a training, evenly spaced."""
TARGET = 0.6
ANSWER = "curve "


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """How a trainer trains a small model if nobody tells it otherwise."""

    batch: int
    lr: float
    beta2: float
    weight_decay: float
    warm_up_steps: int
    decay: str
    """``cosine``, to a tenth, or ``linear``, to zero."""

    def rate(self, step: int, *, steps: int) -> float:
        """The learning rate of ``step``; the first is 0."""
        if step < self.warm_up_steps:
            return self.lr * (step + 1) / (self.warm_up_steps + 1)
        done = (step - self.warm_up_steps) / max(1, steps - self.warm_up_steps)
        if self.decay == "linear":
            return self.lr * (1 - done)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


DEFAULTS = {
    # README of nanoGPT, the small model for a CPU, and config/train_shakespeare_char.py, which it changes.
    NANOGPT: Defaults(batch=12, lr=1e-3, beta2=0.99, weight_decay=0.1, warm_up_steps=100, decay="cosine"),
    # transformers.TrainingArguments.
    HUGGING_FACE: Defaults(batch=8, lr=5e-5, beta2=0.999, weight_decay=0.0, warm_up_steps=0, decay="linear"),
}

Curve = list[tuple[float, float]]
"""Training seconds so far, and the validation loss then."""


def measure_time_to_loss(
    repository: Path, folder: Path, *, device: str, threads: int, data: Path, peers: dict[str, Path], rounds: int
) -> dict[str, Any]:
    """The seconds in which every trainer reaches the loss, in turn; None where one never does.

    Raises:
        UserError: a training failed.
    """
    kinds = [OURS, *(kind for kind in DEFAULTS if kind == HUGGING_FACE or kind in peers)]
    curves: dict[str, list[Curve]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            own = folder / f"{number}-{kind.replace(' ', '-')}"
            if kind == OURS:
                curve = _own_curve(repository, own, device=device, threads=threads, data=data)
            else:
                curve = _peer_curve(own, kind, device=device, threads=threads, data=data, peer=peers.get(kind))
            curves[kind].append(curve)
    other = NANOGPT if NANOGPT in peers else HUGGING_FACE
    loss = sum(curve[-1][1] for curve in curves[other]) / rounds
    ours, theirs = ([seconds_to(curve, loss) for curve in curves[kind]] for kind in (OURS, other))
    share = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "loss": loss,
        "other": other,
        "share": span(share),
        "target": TARGET,
        "curves": curves,
        "defaults": {kind: vars(DEFAULTS[kind]) for kind in kinds if kind != OURS},
    }


def seconds_to(curve: Curve, loss: float) -> float:
    """The seconds at which a curve first is at ``loss`` or below, on a line between two validations; inf if never.

    The end of a training counts as reaching its own loss, which its repetition may miss by the last digits.
    """
    before = (0.0, math.inf)
    for seconds, value in curve:
        if value <= loss + 1e-3:
            share = 1.0 if math.isinf(before[1]) else min(1.0, (before[1] - loss) / max(before[1] - value, 1e-9))
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    return math.inf


def _own_curve(repository: Path, run_dir: Path, *, device: str, threads: int, data: Path) -> Curve:
    recipe = repository / "ds_configs" / "sizes" / "demo.json"
    batch = json.loads(recipe.read_text(encoding="utf-8"))["train_batch_size"]
    steps = TOKENS // (batch * LENGTH)
    values: dict[str, Any] = {
        "run_type": "baseline",
        "deepspeed_config": recipe,
        "model_size": "demo",
        "seq_length": LENGTH,
        "train_data_path": data / "train.bin",
        "val_data_path": data / "val.bin",
        "max_val_steps": VALIDATION_WINDOWS // batch,
        "max_train_steps": steps,
        "eval_every": steps // VALIDATIONS,
        "save_every": 0,
        "checkpoint_path": run_dir,
        "device": device,
    }
    if device == "cpu":
        values["threads_per_device"] = threads
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(repository / "src" / "gpt2.py"), *words, "--no_inference"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the demo's training failed: {done.stderr.strip()[-500:]}")
    curve, seconds = [], 0.0
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        seconds = entry.get("train_time_sec", seconds)
        if "val_loss" in entry:
            curve.append((seconds, entry["val_loss"]))
    return curve


def _peer_curve(folder: Path, kind: str, *, device: str, threads: int, data: Path, peer: Path | None) -> Curve:
    folder.mkdir(parents=True)
    job = {"kind": kind, "device": device, "threads": threads, "data": str(data), "peer": str(peer) if peer else None}
    write_json_atomic(folder / "job.json", job)
    command = [sys.executable, "-m", "dsgpt.benchmarks.speed.time_to_loss", str(folder / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return [(seconds, loss) for seconds, loss in json.loads(line.removeprefix(ANSWER))]
    raise UserError(f"{kind}'s training failed: {done.stderr.strip()[-1000:]}")


def train_peer(job: dict[str, Any]) -> Curve:
    """Train as ``job`` says, in this process; returns the curve."""
    import torch  # noqa: PLC0415

    from dsgpt.benchmarks.speed.trainers import open_loop  # noqa: PLC0415

    defaults, shape = DEFAULTS[job["kind"]], published("demo", length=LENGTH, vocab_size=VOCABULARY)
    work = Work(shape=shape, batch=defaults.batch, precision="fp32", device=job["device"], threads=job["threads"])
    torch.manual_seed(1337)
    data, peer = Path(job["data"]), job["peer"]
    loop = open_loop(
        job["kind"],
        work,
        tokens=data / "train.bin",
        peer=Path(peer) if peer else None,
        betas=(0.9, defaults.beta2),
        weight_decay=defaults.weight_decay,
    )
    steps = TOKENS // (defaults.batch * LENGTH)
    every, curve, seconds = max(1, steps // VALIDATIONS), [], 0.0
    for step in range(steps):
        started = time.perf_counter()
        loss = loop.step(lr=defaults.rate(step, steps=steps))
        loss.item()
        seconds += time.perf_counter() - started
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append((seconds, loop.validate(data / "val.bin", windows=VALIDATION_WINDOWS)))
    return curve


if __name__ == "__main__":
    print(ANSWER + json.dumps(train_peer(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
