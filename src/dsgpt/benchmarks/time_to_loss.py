"""The time until a training reaches a loss: the demo's recipe against nanoGPT's settings for a model of its size.

Both train the same shape on the demo's text for the demo's number of tokens, in fp32, each with its own batch, learning
rate and schedule. The loss to reach is the one that nanoGPT has at the end of the same round. Only training counts, not
validation. Validation uses windows that no search of settings has seen.
"""

import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.speed_rounds import span
from dsgpt.benchmarks.speed_work import NANOGPT, OURS, Work, published
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.data.token_file import TokenFileWriter, open_token_file

LENGTH, TOKENS = 128, 819_200
"""As in ``make demo``."""
SEARCHED_WINDOWS, VALIDATION_WINDOWS = 640, 480
"""Of the validation file: those at its beginning, which ``benchmark.py recipes`` uses, and those after them."""
RECIPE = "ds_configs/sizes/demo.json"
"""The demo's."""
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

    def rate(self, step: int, *, steps: int) -> float:
        """The learning rate of ``step``; the first is 0. A cosine to a tenth follows the warm-up."""
        if step < self.warm_up_steps:
            return self.lr * (step + 1) / (self.warm_up_steps + 1)
        done = (step - self.warm_up_steps) / max(1, steps - self.warm_up_steps)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


DEFAULTS = {
    # README of nanoGPT, the small model for a CPU, and config/train_shakespeare_char.py, which it changes. Its warm-up
    # is meant for 2,000 steps or more.
    NANOGPT: Defaults(batch=12, lr=1e-3, beta2=0.99, weight_decay=0.1, warm_up_steps=100),
}

Curve = list[tuple[float, float]]
"""Training seconds so far, and the validation loss then."""


def measure_time_to_loss(
    repository: Path, folder: Path, *, device: str, threads: int, data: Path, peer: Path, rounds: int
) -> dict[str, Any]:
    """Our time to the loss of nanoGPT's end, as a share of nanoGPT's, in turns; None if ours never reaches it.

    Raises:
        UserError: a training failed.
    """
    _cut_validation(data / "val.bin", folder / "val.bin")
    curves: dict[str, list[Curve]] = {OURS: [], NANOGPT: []}
    for number in range(rounds):
        for kind in (OURS, NANOGPT) if number % 2 == 0 else (NANOGPT, OURS):
            own = folder / f"{number}-{kind}"
            if kind == OURS:
                curve = _own_curve(repository, own, device=device, threads=threads, data=data, val=folder / "val.bin")
            else:
                curve = _peer_curve(own, device=device, threads=threads, data=data, val=folder / "val.bin", peer=peer)
            curves[kind].append(curve)
    shares = [share_of(ours, theirs) for ours, theirs in zip(curves[OURS], curves[NANOGPT], strict=True)]
    reached = [share for share in shares if share is not None]
    return {
        "share": span(reached) if len(reached) == len(shares) else None,
        "losses": {kind: [curve[-1][1] for curve in found] for kind, found in curves.items()},
        "target": TARGET,
        "curves": curves,
        "settings": asdict(DEFAULTS[NANOGPT]),
    }


def share_of(ours: Curve, theirs: Curve) -> float | None:
    """Our seconds to their last loss, divided by theirs; None if ours ends above it."""
    seconds, loss = theirs[-1]
    found = seconds_to(ours, loss)
    return None if found is None else found / seconds


def seconds_to(curve: Curve, loss: float) -> float | None:
    """The seconds at which a curve first is at ``loss`` or below, on a line between two validations; None if never."""
    earlier, above = 0.0, math.inf
    for seconds, value in curve:
        if value <= loss:
            share = 1.0 if math.isinf(above) else (above - loss) / (above - value)
            return earlier + share * (seconds - earlier)
        earlier, above = seconds, value
    return None


def _cut_validation(whole: Path, path: Path) -> None:
    """A token file of the windows that are validated on here."""
    source = open_token_file(whole)
    first, end = (windows * LENGTH for windows in (SEARCHED_WINDOWS, SEARCHED_WINDOWS + VALIDATION_WINDOWS))
    with TokenFileWriter(
        path,
        vocab_size=source.sidecar.vocab_size or VOCABULARY,
        eot_id=source.sidecar.eot_id or 0,
        tokenizer=None,
        source=f"windows of {whole.name}",
    ) as writer:
        writer.append(source.memmap()[first : end + 1])


def _own_curve(repository: Path, run_dir: Path, *, device: str, threads: int, data: Path, val: Path) -> Curve:
    recipe = repository / RECIPE
    batch = json.loads(recipe.read_text(encoding="utf-8"))["train_batch_size"]
    steps = TOKENS // (batch * LENGTH)
    values: dict[str, Any] = {
        "run_type": "baseline",
        "deepspeed_config": recipe,
        "model_size": "demo",
        "seq_length": LENGTH,
        "train_data_path": data / "train.bin",
        "val_data_path": val,
        "precision": "fp32",
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


def _peer_curve(folder: Path, *, device: str, threads: int, data: Path, val: Path, peer: Path) -> Curve:
    folder.mkdir(parents=True)
    job = {"device": device, "threads": threads, "train": str(data / "train.bin"), "val": str(val), "peer": str(peer)}
    write_json_atomic(folder / "job.json", job)
    command = [sys.executable, "-m", "dsgpt.benchmarks.time_to_loss", str(folder / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER):
            return [(seconds, loss) for seconds, loss in json.loads(line.removeprefix(ANSWER))]
    raise UserError(f"nanoGPT's training failed: {done.stderr.strip()[-1000:]}")


def train_peer(job: dict[str, Any]) -> Curve:
    """Train as ``job`` says, in this process; returns the curve."""
    import torch  # noqa: PLC0415

    from dsgpt.benchmarks.speed_trainers import open_loop  # noqa: PLC0415

    defaults, shape = DEFAULTS[NANOGPT], published("demo", length=LENGTH, vocab_size=VOCABULARY)
    work = Work(shape=shape, batch=defaults.batch, precision="fp32", device=job["device"], threads=job["threads"])
    torch.manual_seed(1337)
    loop = open_loop(
        NANOGPT,
        work,
        tokens=Path(job["train"]),
        peer=Path(job["peer"]),
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
            curve.append((seconds, loop.validate(Path(job["val"]), windows=VALIDATION_WINDOWS)))
    return curve


if __name__ == "__main__":
    print(ANSWER + json.dumps(train_peer(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
