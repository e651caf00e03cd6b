"""``benchmark.py saving``: how long training waits for a checkpoint.

The same baseline training runs with ``--save_mode`` sync and async in turn, so that other load on the machine affects
both. The figures are those that a run records for every save. The last save of a run does not count, because it is
sync in both modes.

Then processes of their own write the state of the same model together, each at a limited bandwidth, as ranks on several
machines do. One processor and one disk could not show that the time of a save falls with the number of writers.
"""

import io
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.launch import train
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.files import write_json_atomic
from dsgpt.common.text import table
from dsgpt.config.options import SAVE_MODES


def saving_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.saving`` makes it.
        source: the record's path, for the reader.
    """
    size, saves = record["figures"]["sync"]["bytes"]["median"] / 1e6, max(len(run["saves"]) for run in record["runs"])
    rows = [[count, frame.span_words(seconds, ".2f")] for count, seconds in record.get("writers", {}).items()]
    text = frame.filled("saving-writers", record, rate=MB_PER_SEC, block=BLOCK >> 20)
    writers = frame.section("Several writers", ["processes", "until all have written, s (range)"], rows, text=text)
    figures = "\n".join(["## Figures\n", *summary_lines(record)])
    return frame.page_of(frame.filled("saving", record, record_at=source, size=size, saves=saves), figures, writers)


def summary_lines(record: frame.Record) -> list[str]:
    """The table of both modes, for a console."""
    titles = {
        "save_stall_sec": "training waits, s (range)",
        "save_total_sec": "until published, s (range)",
        "training_sec": "a run's steps and saves, s (range)",
    }
    modes = record["figures"].items()
    rows = [[mode, *(frame.span_words(figures[key], ".3f") for key in titles)] for mode, figures in modes]
    return table(["save mode", *titles.values()], rows).splitlines()


SAVE_EVERY, SAVES = 10, 4
"""Steps between saves, and the number of saves of a run that count."""
RATIO_BOUND = 0.2
"""Bound on the median stall of async, divided by that of sync."""
WORK: dict[str, Any] = {
    **{"model_size": "tiny", "vocab_size": 50257, "seq_length": 64},
    **{"global_batch_size": 4, "micro_batch_size_per_gpu": 4},
    **{"max_train_steps": SAVE_EVERY * SAVES + 1, "max_val_steps": 1},
    **{"save_every": SAVE_EVERY, "keep_checkpoints": 2},
}

MB_PER_SEC, WRITERS = 50, (1, 2, 4)
"""The bandwidth of each process, and how many write together."""
BLOCK = 1 << 20
"""Bytes that a process may write at once."""

Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavingOptions(frame.SuiteOptions):
    """The command line."""

    rounds: int = flag(POSITIVE, "N", "runs of each save mode (default: %(default)s)", default=5)
    device: str = frame.device_flag("cpu or cuda")


class Saving(frame.Suite[SavingOptions, Run]):
    """Trains with both save modes in turn.

    saving: train the model `tiny` with --save_mode sync and async in turn, and compare how long training waits for each
    checkpoint. Exit code 0: async waits at most a fifth of the time; 1: longer.

    Examples:
      .venv/bin/python src/benchmark.py saving
      .venv/bin/python src/benchmark.py saving --rounds 10
    """

    name, record_of, unit = "saving", "saves", "run"
    flags, page, summary = SavingOptions, staticmethod(saving_page), staticmethod(summary_lines)

    def plan(self) -> int:
        return self.options.rounds * (len(SAVE_MODES) + len(WRITERS))

    def begin(self) -> None:
        from dsgpt.benchmarks.cells import file_values, prepare_corpus  # noqa: PLC0415 - numpy takes its time

        recipe = self.folder / "recipe.json"
        corpus = prepare_corpus(self.repository, self.folder / "corpus")
        write_json_atomic(recipe, {"optimizer": {"type": "AdamW", "params": {"lr": 0.0003}}})
        files = file_values(corpus, recipe=recipe, run_dir=self.folder)
        self._flags = {"run_type": "baseline", "device": self.options.device, **files, **WORK}

    def results(self) -> Iterator[Run]:
        for number, mode in frame.turns(SAVE_MODES, rounds=self.options.rounds):
            values = self._flags | {"save_mode": mode, "checkpoint_path": self.folder / f"{number}-{mode}"}
            record = train(values, repository=self.repository, what=f"a training with --save_mode {mode}")
            saves, parameters = record["saves"][:SAVES], record["training_config"]["parameters"]
            seconds = record["summary"]["train_time_sec"] + sum(save["save_stall_sec"] for save in saves)
            yield {"round": number, "mode": mode, "saves": saves, "parameters": parameters, "training_sec": seconds}

        for number, writers in itertools.product(range(1, self.options.rounds + 1), WRITERS):
            seconds = write_together(self.folder / f"{number}-{writers}", writers, preset=WORK["model_size"])
            yield {"round": number, "writers": writers, "seconds": seconds}

    def line(self, result: Run, *, count: str, left: str) -> str:  # noqa: ARG002 - the rounds are its count
        if "writers" in result:
            return f"round {result['round']}, {result['writers']} processes: {result['seconds']:.2f} s until all wrote"
        stalls = ", ".join(f"{save['save_stall_sec']:.3f}" for save in result["saves"])
        return f"round {result['round']} of {self.options.rounds}, {result['mode']}: training waited {stalls} s"

    def record(self, results: Sequence[Run]) -> frame.Record:
        runs = [{key: value for key, value in run.items() if key != "round"} for run in results if "saves" in run]
        together = results[len(runs) :]
        times = {writers: [one["seconds"] for one in together if one["writers"] == writers] for writers in WRITERS}
        figures: dict[str, dict[str, Any]] = {}
        for mode in SAVE_MODES:
            own = [run for run in runs if run["mode"] == mode]
            saves = [save for run in own for save in run["saves"]]
            of_saves = ("save_stall_sec", "save_total_sec", "bytes")
            figures[mode] = {key: frame.span([save[key] for save in saves]) for key in of_saves}
            figures[mode]["training_sec"] = frame.span([run["training_sec"] for run in own])
        work = {"work": WORK, "parameters": runs[0]["parameters"], "rounds": self.options.rounds}
        return work | {
            "runs": runs,
            "figures": figures,
            "writers": {str(count): frame.span(seconds) for count, seconds in times.items()},
            "ratio": figures["async"]["save_stall_sec"]["median"] / figures["sync"]["save_stall_sec"]["median"],
            "ratio_bound": RATIO_BOUND,
        }

    def failures(self, record: frame.Record) -> list[str]:
        return [] if record["ratio"] <= RATIO_BOUND else ["async waits longer than the bound allows"]


class SlowFile(io.BufferedWriter):
    """A file whose process may write ``MB_PER_SEC`` to all its files, a block at a time: a token bucket."""

    _empty_until = 0.0
    """Time at which there are tokens again, for every file of the process."""

    def write(self, data: Any) -> int:
        """Write ``data``, bytes or a view of them, as its tokens come; return how many."""
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            time.sleep(max(0.0, SlowFile._empty_until - time.perf_counter()))
            super().write(block)
            SlowFile._empty_until = max(SlowFile._empty_until, time.perf_counter()) + len(block) / (MB_PER_SEC * 1e6)
        return len(data)


def write_together(folder: Path, writers: int, *, preset: str) -> float:
    """Seconds until as many processes have written the state of a model of size ``preset`` together."""
    folder.mkdir()
    spawn = multiprocessing.get_context("spawn")
    begin, ends = spawn.Barrier(writers), spawn.SimpleQueue()
    values = {"writers": writers, "preset": preset, "begin": begin, "ends": ends}
    processes = [spawn.Process(target=_write, args=(folder, rank), kwargs=values) for rank in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"a process that wrote a part of a state ended with code {failed[0]}")
    return max(float(ends.get()) for _ in processes)


def _write(folder: Path, rank: int, *, writers: int, preset: str, begin: Barrier, ends: "SimpleQueue[float]") -> None:
    """One process of ``write_together``: it holds everything, as a rank of DDP does, and writes its share."""
    import torch  # noqa: PLC0415 - takes seconds

    from dsgpt.checkpoints.pieces import Box  # noqa: PLC0415
    from dsgpt.checkpoints.training_state import ParamState, Shards, write_shards  # noqa: PLC0415
    from dsgpt.formats.tensor_files import SafetensorsWriter  # noqa: PLC0415
    from dsgpt.model.config import PRESETS  # noqa: PLC0415
    from dsgpt.model.gpt2 import parameter_shapes  # noqa: PLC0415

    create = SafetensorsWriter.__init__

    def create_slow(self: SafetensorsWriter, *given: Any, **named: Any) -> None:
        create(self, *given, **named)
        self._file = SlowFile(self._file.detach())

    SafetensorsWriter.__init__ = create_slow  # type: ignore[method-assign]
    torch.set_num_threads(1)
    shapes = parameter_shapes(PRESETS[preset])
    states = [(name, ParamState(*(torch.rand(shape) for _ in range(3)))) for name, shape in shapes.items()]
    everything = Shards({name: [Box.whole(shape)] for name, shape in shapes.items()}, iter(states))
    begin.wait()
    started = time.perf_counter()
    write_shards(folder, everything.share(rank, writers), rank=rank, ranks=writers)
    ends.put(time.perf_counter() - started)
