"""``make demo``: text to two trained models, the same training on one device and on all, to charts of what it cost."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from dsgpt.errors import EXIT_INTERRUPTED
from dsgpt.topology import free_port

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = Path("ds_configs/zero1.json")
DATA = Path("data/python-stdlib")
CHARTS = Path("charts/demo")
GLOBAL_BATCH_SIZE = 32  # the recipe's; a number of GPUs must divide it
WORK = [
    "--train_data_path", str(DATA / "train.bin"),
    "--val_data_path", str(DATA / "val.bin"),
    "--deepspeed_config", str(RECIPE),
    "--model_size", "demo",
    "--seq_length", "128",
    "--eval_every", "50",
    "--max_val_steps", "20",
    "--save_every", "50",
    "--steps_per_print", "10",
    "--resume",
]  # fmt: skip


def main() -> int:
    """Run the four steps; each one skips what is already done. The exit code of the first that fails comes back."""
    parser = argparse.ArgumentParser(description="Train the demo's two models, and compare them.", allow_abbrev=False)
    parser.add_argument(
        "--steps", type=int, default=200, metavar="N", help="optimizer steps of each training (default: 200)"
    )
    steps_of_training = parser.parse_args().steps
    from dsgpt.device import cuda_devices  # noqa: PLC0415 - torch takes seconds

    gpus = cuda_devices()
    # DeepSpeed's launcher looks for a GPU by itself and warns where there is none.
    environment = dict(os.environ) if gpus else {**os.environ, "DS_ACCELERATOR": "cpu"}
    started = time.perf_counter()
    steps = _steps(gpus, steps_of_training)
    for number, (title, command) in enumerate(steps, start=1):
        print(f"\n[{number}/{len(steps)}] {title}", flush=True)
        code = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode
        if code:
            print(f"error: the demo stopped at step {number}, {title} (exit code {code})", file=sys.stderr)
            return code
    print(f"\nthe demo took {time.perf_counter() - started:.0f} s; ask its model for text with")
    print('  .venv/bin/python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("')
    return 0


def _steps(gpus: int, steps_of_training: int) -> list[tuple[str, list[str]]]:
    """Title and command of each step, on ``gpus`` GPUs or, with none, on two devices of half the CPU's cores each."""
    python = sys.executable
    train = ["src/gpt2.py", *WORK, "--max_train_steps", str(steps_of_training), *_device_flags(gpus)]
    devices = max(n for n in range(1, (gpus or 2) + 1) if GLOBAL_BATCH_SIZE % n == 0)
    launcher = [str(Path(python).parent / "deepspeed"), "--quiet", "--num_gpus", str(devices)]
    launcher += ["--master_port", str(free_port())]
    baseline, zero1 = "checkpoint/demo-baseline", "checkpoint/demo-zero1"
    device = "GPU" if gpus else "half of the CPU's cores"
    return [
        ("prepare the text", [python, "data_prep/preprocess.py"]),
        (
            f"train the baseline on one device ({device})",
            [python, *train, "--run_type", "baseline", "--checkpoint_path", baseline],
        ),
        (
            f"train the same with DeepSpeed ZeRO-1 on {devices} device{'s' * (devices > 1)}",
            [*launcher, *train, "--run_type", "optimized", "--checkpoint_path", zero1],
        ),
        (
            "compare them",
            [
                python,
                "charts/generate_charts.py",
                "--output-dir",
                str(CHARTS),
                "--run",
                f"baseline={baseline}",
                "--run",
                f"zero1={zero1}",
            ],
        ),
    ]


def _device_flags(gpus: int) -> list[str]:
    if gpus:
        return ["--device", "cuda"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return ["--device", "cpu", "--threads_per_device", str(max(1, cores // 2))]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("error: interrupted; make demo goes on from the last checkpoint", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
