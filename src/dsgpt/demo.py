"""The demo: prepares text, trains the same model on one device and on several, and draws the comparison.

With ``--strategies`` it also trains the model with each of them. An entry above the rooms; ``src/demo.py`` calls it.
"""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dsgpt.benchmarks.sweep_cells import STRATEGIES
from dsgpt.common.command_line import POSITIVE, Terminated, complain, flag, read_options
from dsgpt.common.errors import DifferentRunError, UserError, did_you_mean
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import IN_CHECKOUT, REPOSITORY, next_line
from dsgpt.data.sources import TRANSFORMERS_NAME
from dsgpt.machine.launcher import LAUNCHERS, launcher_command

HOME = Path() if IN_CHECKOUT else REPOSITORY
"""Folder of the scripts and recipes; a checkout is also the working folder."""
TRAIN = str(HOME / "src/gpt2.py")
GLOBAL_BATCH_SIZE = 8  # as in the recipe; the number of GPUs must divide it
STEPS = 800
PROMPT = "def main("
TRAINED = ("baseline", "zero1")
"""Strategies that the demo always trains."""
TRAINING_KEYS = ("train_batch_size", "optimizer", "scheduler", "gradient_clipping")
"""Keys of a recipe that change the training; the others change how it is executed."""
WORK = [
    "--deepspeed_config", str(HOME / "ds_configs/sizes/demo.json"), "--model_size", "demo", "--seq_length", "128",
    "--eval_every", "200", "--max_val_steps", "80", "--save_every", "200", "--steps_per_print", "40",
]  # fmt: skip


@dataclass(frozen=True)
class Demo:
    """The flags of the demo, and the folders and trainings that follow from them."""

    steps: int = flag(POSITIVE, "N", "optimizer steps of each training (default: %(default)s)", default=STEPS)
    into: Path = flag(Path, "DIR", "receives data/, checkpoint/ and charts/ (default: the repository)", default=Path())
    strategies: tuple[str, ...] = flag(lambda text: tuple(text.replace(",", " ").split()), "NAMES", default=())
    """further strategies to train with, such as "ddp fsdp zero3" """
    gpus: int = 0

    @property
    def data(self) -> Path:
        """The folder of the token files."""
        return self.into / "data" / TRANSFORMERS_NAME

    def run_folder(self, name: str) -> Path:
        """The folder of the run ``name``."""
        return self.into / "checkpoint" / f"demo-{name}"

    def training(self, run_type: str, name: str, *, recipe: Path | None = None) -> list[str]:
        """The flags of a training, without ``--resume`` or ``--overwrite``; ``recipe`` replaces that of the demo."""
        other = [] if recipe is None else ["--deepspeed_config", str(recipe)]
        files = ["--train_data_path", str(self.data / "train.bin"), "--val_data_path", str(self.data / "val.bin")]
        device = ["--device", "cuda"]
        if not self.gpus:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
            device = ["--device", "cpu", "--threads_per_device", str(max(1, cores // 2))]
        length = ["--max_train_steps", str(self.steps), *device]
        return [*files, *WORK, *other, *length, "--run_type", run_type, "--checkpoint_path", str(self.run_folder(name))]

    @property
    def devices(self) -> int:
        """Number of devices of the second training."""
        return max(n for n in range(1, (self.gpus or 2) + 1) if GLOBAL_BATCH_SIZE % n == 0)


def main() -> int:
    """Run the steps, each of which skips what is already done; returns the exit code of the first that fails."""
    demo, problems = read_options(Demo, description="Train the demo's models, and compare them.")
    problems.raise_if_any()
    from dsgpt.machine.device import cuda_devices  # noqa: PLC0415 - torch takes seconds

    if IN_CHECKOUT:
        os.chdir(REPOSITORY)
    further = tuple(name for name in dict.fromkeys(demo.strategies) if name not in TRAINED)
    demo = replace(demo, gpus=cuda_devices(), strategies=further)
    for name in demo.strategies:
        if name not in STRATEGIES:
            every = ", ".join(STRATEGIES)
            problems.add(f"--strategies {name}: unknown{did_you_mean(name, STRATEGIES)}; known are {every}")
        elif not STRATEGIES[name].runs_on(demo.devices):
            share = STRATEGIES[name].share
            problems.add(f"--strategies {name}: needs a multiple of {share} devices, not {demo.devices}")
    problems.raise_if_any()
    if not demo.gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed's launcher looks for a GPU and warns
    started, steps = time.perf_counter(), _steps(demo)
    for number, (title, step) in enumerate(steps, start=1):
        print(f"\n[{number}/{len(steps)}] {title}", flush=True)
        if code := step(demo):
            return complain([f"the demo stopped at step {number}, {title} (exit code {code})"], code)
    print(f"\nthe demo took {time.perf_counter() - started:.0f} s")
    print(next_line([sys.executable, *_sample_words(demo)]))
    return 0


def _steps(demo: Demo) -> list[tuple[str, Callable[[Demo], int]]]:
    """Title of each step, and its function, which returns an exit code."""
    device = "GPU" if demo.gpus else "half of the CPU's cores"
    devices = f"{demo.devices} device{'s' * (demo.devices > 1)}"
    return [
        ("prepare the text", _prepare),
        (f"train the baseline on one device ({device})", partial(_train, "baseline")),
        (f"train the same with DeepSpeed ZeRO-1 on {devices}", partial(_train, "zero1")),
        *((f"train the same with {name} on {devices}", partial(_train, name)) for name in demo.strategies),
        ("compare them", _compare),
        ("write text with the second model", lambda demo: _run([sys.executable, *_sample_words(demo)])),
    ]


def _prepare(demo: Demo) -> int:
    """Prepare the text unless it exists: another release of transformers gives another, and runs may depend on it."""
    if all((demo.data / name).exists() for name in ("preparation.json", "train.bin", "val.bin")):
        print(f"{demo.data} contains prepared text, which is used unchanged", flush=True)
        return 0
    words = ["--dataset", TRANSFORMERS_NAME, "--output_dir", str(demo.data)]
    return _run([sys.executable, str(HOME / "data_prep/preprocess.py"), *words])


def _train(name: str, demo: Demo) -> int:
    """Train with one strategy; those of ``TRAINED`` use the demo's recipe unchanged.

    Others use their recipe of ``ds_configs/``, with the ``TRAINING_KEYS`` of the demo's recipe.
    """
    how, recipe = STRATEGIES[name], None
    if how.run_type == "optimized" and name not in TRAINED:
        recipe = demo.into / "checkpoint" / "demo-recipes" / f"{name}.json"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        files = (REPOSITORY / "ds_configs" / f"{file}.json" for file in ("sizes/demo", how.recipe))
        ours, theirs = (json.loads(file.read_text()) for file in files)
        decides = {key: ours[key] for key in TRAINING_KEYS if key in ours}
        write_json_atomic(recipe, {key: each for key, each in theirs.items() if key not in TRAINING_KEYS} | decides)
    words = demo.training(how.run_type, name, recipe=recipe)
    return _run([*launcher_command(LAUNCHERS[how.run_type], demo.devices), TRAIN, *words, _resume_or_overwrite(words)])


def _compare(demo: Demo) -> int:
    charts = demo.into / "charts" / "demo"
    runs = [word for name in (*TRAINED, *demo.strategies) for word in ("--run", f"{name}={demo.run_folder(name)}")]
    return _run([sys.executable, str(HOME / "charts/generate_charts.py"), "--output-dir", str(charts), *runs])


def _sample_words(demo: Demo) -> list[str]:
    return [str(HOME / "src/generate.py"), "--checkpoint", str(demo.run_folder("zero1")), "--prompt", PROMPT]


def _resume_or_overwrite(words: Sequence[str]) -> str:
    """``--resume``; or ``--overwrite``, after a message, if the folder contains a sound run with other settings.

    Another number of steps is another training, because the learning rate decays over all steps; so is another recipe
    or text. After any other fault, such as a damaged checkpoint or a full disk, nothing is replaced: the training
    reports it, and the demo ends.
    """
    folder = words[words.index("--checkpoint_path") + 1]
    refusal = _refusal([*words, "--resume"])
    if refusal is None or _refusal([*words, "--overwrite"]) is not None:  # the run reports what --overwrite cannot cure
        return "--resume"
    if isinstance(refusal, DifferentRunError):
        print(f"{folder} contains another run, which is replaced:", flush=True)
        for line in refusal.problems:
            print(f"  {line.removeprefix('--resume: ')}", flush=True)
        return "--overwrite"
    if isinstance(refusal, UserError):
        cure = f"if the missing files are lost, remove it (rm -r {shlex.quote(folder)}) and repeat make demo"
        print(f"{folder} cannot be resumed: {cure}", flush=True)
    return "--resume"


def _refusal(words: Sequence[str]) -> UserError | OSError | None:
    """The mistakes that a dry run reports, or the error that stopped it; None if there is none."""
    from dsgpt.training.command import check  # noqa: PLC0415 - torch takes seconds

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            check(words)
        except (UserError, OSError) as error:
            return error
    return None


def _run(command: list[str]) -> int:
    """Run ``command`` and return its exit code. A training that runs when the demo is asked to end saves first."""
    ends = {signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # one that comes while it starts could not be passed on

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    with subprocess.Popen(command, preexec_fn=unblock) as process:  # noqa: PLW1509 - the demo has no threads
        try:
            unblock()
            return process.wait()
        except Terminated:
            process.terminate()
            raise
