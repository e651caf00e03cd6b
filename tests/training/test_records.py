"""The files of a run have every key, and their values are right."""

import json
import math

import pytest
import torch
from training_runs import GLOBAL_BATCH, SGD, finished, read_lines, read_record, train, write_optimizer_recipe

from dsgpt.checkpoints.manifest import Segment
from dsgpt.model.config import GPT2Config

TOP = {
    "schema_version", "run_id", "timestamp_utc", "status", "resumed_from", "git_commit", "command_line", "env", "host",
    "hardware", "data", "training_config", "deepspeed_config", "segments", "epochs", "summary", "inference",
    "train_time_per_epoch", "train_loss_per_epoch", "val_loss_per_epoch", "train_throughput", "inference_latency",
    "inference_throughput",
}  # fmt: skip
EPOCH = {
    "epoch_idx", "epoch_wall_time_sec", "steps", "micro_steps", "optimizer_steps", "tokens_processed_global",
    "tokens_per_sec_global", "train_loss_avg_global", "val_loss_avg_global", "max_cuda_mem_allocated_bytes_rank0",
    "max_cuda_mem_reserved_bytes_rank0", "peak_rss_bytes_rank0", "step_time_mean_sec", "step_time_p50_sec",
    "step_time_p95_sec", "dataload_time_mean_sec",
}  # fmt: skip
CONSTANT_AFTER_2 = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
CONFIG = {
    "model_name", "model_size", "seq_len", "epochs", "micro_batch_size_per_gpu", "grad_accum_steps",
    "global_batch_size", "lr", "optimizer", "precision", "zero_stage", "deepspeed_enabled", "strategy", "seed",
    "max_train_steps",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """Two epochs of a baseline, short by their long sequences; the context is too small for 100 new tokens."""
    folder = tmp_path_factory.mktemp("records")
    recipe = write_optimizer_recipe(folder / "recipe.json")
    flags = ("--epochs", "2", "--grad_accum_steps", "2", "--seq_length", "64", "--global_batch_size", "64")
    finished(train(folder / "run", corpus, recipe, *flags))
    return folder / "run"


def test_every_key_is_there(run):
    record = read_record(run)
    assert record.keys() >= TOP
    assert record["schema_version"] == "2.1"
    assert record["status"] == "completed"
    assert record["training_config"].keys() >= CONFIG
    assert record["env"].keys() == {
        "python_version", "torch_version", "transformers_version", "deepspeed_version", "cuda_version",
        "allowed_faults",
    }  # fmt: skip
    assert record["hardware"].keys() >= {"gpu_name", "gpu_count_visible", "world_size"}
    assert record["data"].keys() >= {"train_path", "train_sha256", "val_path", "val_sha256"}
    assert all(epoch.keys() >= EPOCH for epoch in record["epochs"])


def test_a_run_of_one_process_has_one_segment_with_its_figures(run):
    record = read_record(run)
    (segment,) = record["segments"]
    assert segment.keys() == Segment.__dataclass_fields__.keys()
    assert (segment["first_step"], segment["last_step"]) == (1, record["summary"]["optimizer_steps"])
    assert segment["train_time_sec"] == pytest.approx(record["summary"]["train_time_sec"])
    for key in ("mean_tokens_per_sec_global", "peak_rss_bytes_rank0"):
        assert segment[key] == record["summary"][key]
    for key in ("hardware", "env", "host", "git_commit", "command_line", "timestamp_utc", "resumed_from"):
        assert segment[key] == record[key]
    assert (
        segment.items() >= {key: record["training_config"][key] for key in ("strategy", "compile", "precision")}.items()
    )


def test_the_figures_agree_with_the_steps(run):
    record, lines = read_record(run), read_lines(run)
    assert [epoch["epoch_idx"] for epoch in record["epochs"]] == [0, 1]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for epoch in record["epochs"]:
        own = [line for line in lines if line["epoch"] == epoch["epoch_idx"]]
        assert epoch["steps"] == epoch["optimizer_steps"] == len(own) == record["training_config"]["steps_per_epoch"]
        assert epoch["micro_steps"] == 2 * len(own)
        assert epoch["tokens_processed_global"] == len(own) * 64 * 64
        assert epoch["train_loss_avg_global"] == pytest.approx(sum(line["loss"] for line in own) / len(own))
        assert epoch["train_time_sec"] == pytest.approx(sum(line["step_time_sec"] for line in own))
    timed = [line for line in lines if not line["warm_up"]]
    assert len(lines) - len(timed) == 3
    speed = len(timed) * 64 * 64 / sum(line["step_time_sec"] for line in timed)
    assert record["summary"]["mean_tokens_per_sec_global"] == pytest.approx(speed)
    assert record["train_throughput"] == record["summary"]["mean_tokens_per_sec_global"]
    assert record["summary"]["mean_tokens_per_sec_per_device"] == record["summary"]["mean_tokens_per_sec_global"]
    assert record["summary"]["flops_per_token"] == GPT2Config(**record["training_config"]["model"]).flops_per_token(64)
    assert record["train_loss_per_epoch"] == [epoch["train_loss_avg_global"] for epoch in record["epochs"]]
    evaluations = [line["val_loss"] for line in read_lines(run, "val_loss")]
    assert record["val_loss_per_epoch"] == evaluations
    assert record["summary"]["best_val_loss"] == min(evaluations)
    assert record["summary"]["final_train_loss"] == lines[-1]["loss"]
    assert lines[-1]["tokens"] == len(lines) * 64 * 64


def test_lines_for_the_user_have_figures_of_their_interval(run):
    lines = read_lines(run)
    shown = [line for line in lines if "interval" in line]
    assert [line["step"] for line in shown] == [1, *range(10, len(lines), 10), len(lines)]
    assert sum(line["interval"]["steps"] for line in shown) == len(lines)
    second = [line for line in lines[1:10] if not line["warm_up"]]
    times = sorted(line["step_time_sec"] for line in second)
    assert shown[1]["interval"] == {
        "steps": 9,
        "tokens_per_sec": pytest.approx(len(times) * 64 * 64 / sum(times)),
        "step_time_p50_sec": times[(len(times) - 1) // 2],
        "step_time_p95_sec": times[-1],
        "data_wait_share": pytest.approx(sum(line["dataload_time_sec"] for line in second) / sum(times)),
        "data_wait_rank": 0,
        "slowest_rank": None,
        "slowest_rank_lag_sec": None,
        "largest_loss": lines[9]["loss"],
        "mfu": None,
    }
    summary = read_record(run)["summary"]
    counted = [line for line in lines if not line["warm_up"]]
    waited, passed = (sum(line[key] for line in counted) for key in ("dataload_time_sec", "step_time_sec"))
    assert (summary["data_wait_share"], summary["data_wait_rank"]) == (pytest.approx(waited / passed), 0)


def test_unknown_values_are_null(run):
    record = read_record(run)
    assert record["summary"]["mfu"] is None
    first = read_lines(run)[0]
    assert set(first["interval"].values()) == {1, first["loss"], None}
    assert record["epochs"][0]["max_cuda_mem_allocated_bytes_rank0"] is None
    assert record["hardware"]["gpu_name"] is None
    assert record["env"]["cuda_version"] == torch.version.cuda  # null in a build without CUDA
    assert record["training_config"]["zero_stage"] is None
    assert record["epochs"][0]["peak_rss_bytes_rank0"] > 10_000_000


def test_inference_fits_the_context(run):
    """64 positions: a prompt of 16 leaves 48, which is not the 100 tokens that the flat key stands for."""
    record = read_record(run)
    assert (record["inference"]["prompt_tokens"], record["inference"]["new_tokens"]) == (16, 48)
    assert record["inference"]["latency_sec"] > 0
    assert record["inference_latency"] is None
    assert record["inference_throughput"] is None


def test_inference_of_100_tokens_fills_the_flat_keys(corpus, tmp_path):
    recipe = write_optimizer_recipe(tmp_path / "recipe.json")
    finished(train(tmp_path / "run", corpus, recipe, "--max_train_steps", "1", "--max_position_embeddings", "116"))
    record = read_record(tmp_path / "run")
    assert record["inference"]["new_tokens"] == 100
    assert record["inference_latency"] == record["inference"]["latency_sec"]
    assert record["inference_throughput"] == pytest.approx(100 / record["inference_latency"])


def test_config_repeats_the_run(run):
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert config["training_config"] == read_record(run)["training_config"]
    assert config["deepspeed_config"]["given"]["train_batch_size"] == GLOBAL_BATCH
    assert config["options"]["global_batch_size"] == 64


def test_the_log_has_the_lines_of_the_console(run):
    log = (run / "train.log").read_text(encoding="utf-8")
    for word in ("strategy    baseline", "batch       64 sequences", "validation loss", "finished"):
        assert word in log
    assert "train loss" in (run / "RUN_COMPLETE.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_loss_that_is_not_finite_ends_the_run(corpus, tmp_path, ranks):
    huge = {"type": "SGD", "params": {**SGD["params"], "lr": 1e30}}
    recipe = write_optimizer_recipe(tmp_path / "recipe.json", optimizer=huge, clipping=0)
    run = tmp_path / "run"
    done = train(
        run, corpus, recipe, "--max_train_steps", "12", "--save_every", "4", "--steps_per_print", "50", ranks=ranks
    )
    assert done.returncode == 3
    assert done.stderr.count("error: step") == 1
    assert "Traceback" not in done.stderr
    record = read_record(run)
    assert record["status"] == "failed"
    assert not list(run.glob("step-*"))
    assert not (run / "RUN_COMPLETE.txt").exists()
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(line["loss"] is None or line["grad_norm"] is None for line in written)
    assert all(line["loss"] is None or math.isfinite(line["loss"]) for line in written)


def test_weights_that_are_not_finite_are_not_saved(corpus, tmp_path):
    """The loss of the saved step was computed before its update, so only the weights show what the update did."""
    infinite = {"type": "SGD", "params": {"lr": 1e38, "weight_decay": 1000.0}}
    recipe = write_optimizer_recipe(
        tmp_path / "recipe.json", optimizer=infinite, clipping=0, scheduler=CONSTANT_AFTER_2
    )
    run = tmp_path / "run"
    done = train(run, corpus, recipe, "--max_train_steps", "9", "--save_every", "3", "--max_val_steps", "1")
    assert done.returncode == 3
    assert "error: step 3: " in done.stderr
    assert not list(run.glob("*step-*"))
