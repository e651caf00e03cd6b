"""``benchmark.py loading``: what reading the training data costs.

A global batch is fetched as a training does, and as nanoGPT's ``get_batch`` does it. That makes a new memory map for
each batch, and of each row a copy for the inputs and one for the targets. Both read the same windows in turn, from a
file that is in the page cache. Processor time counts, so other processes disturb little.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dsgpt.benchmarks import frame
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.text import table

BATCHES, LENGTH, VOCABULARY = (1, 4, 12), 1024, 50_257
"""Windows of a global batch, and their tokens. nanoGPT's own micro batch is 12 windows of 1,024."""
TOKENS, STEPS, READ_BYTES = 1 << 27, 100, 2 << 30
"""Tokens of the file, batches of a turn, and bytes that are read while memory is watched."""
RATIO, SHARE, GROWTH = 3.0, 0.01, 50 << 20
"""Goals: at least this much faster than nanoGPT's way, at most this share of a step of `tiny`, at most these bytes."""
OURS, NANOGPT = "this loader", "nanoGPT's way"


def loading_page(record: frame.Record, *, source: str) -> str:
    """The page; ``source`` is the record's path, for the reader."""
    goals: dict[str, Any] = {"ratio": RATIO, "share": SHARE, "growth": GROWTH >> 20}
    head = frame.filled("loading", record, record_at=source, length=LENGTH, size=TOKENS * 2 >> 20, **goals)
    return frame.page_of(head, f"## Figures\n\n{chr(10).join(summary_lines(record))}")


def summary_lines(record: frame.Record) -> list[str]:
    """The table of all batches, and what memory and a step took."""
    rows = []
    for batch, one in record["batches"].items():
        seconds = [frame.span_words(one["seconds"][way], ".0f", scale=1e6) for way in (OURS, NANOGPT)]
        rows.append([batch, *seconds, frame.span_words(one["ratio"], ".1f")])
    return [
        *table(["windows", f"{OURS}, µs (range)", f"{NANOGPT}, µs", "times as fast"], rows).splitlines(),
        "",
        f"A step of `tiny` on {BATCHES[1]} windows takes {record['step_sec']:.2f} s: fetching is {record['share']:.4%} "
        f"of it. Reading {READ_BYTES >> 30} GiB took {record['growth_bytes'] / (1 << 20):.1f} MiB of private memory.",
    ]


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(frame.SuiteOptions):
    """The command line."""

    rounds: int = flag(POSITIVE, "N", "turns of each way (default: %(default)s)", default=9)


class Loading(frame.Suite[LoadingOptions, dict[str, Any]]):
    """Reads the same windows in two ways.

    loading: fetch global batches as a training does and as nanoGPT does, in turn; and watch memory over 2 GiB. Takes
    about a minute and 256 MiB of disk. Exit code 0: all goals are met; 1: one is not, and the page says which.

    Examples:
      .venv/bin/python src/benchmark.py loading
    """

    name, record_of, unit = "loading", "loading", "turn"
    flags, page, summary = LoadingOptions, staticmethod(loading_page), staticmethod(summary_lines)

    def plan(self) -> int:
        return self.options.rounds * len(BATCHES) * 2 + 1

    def begin(self) -> None:
        import numpy as np  # noqa: PLC0415 - takes its time
        import torch  # noqa: PLC0415

        from dsgpt.data.data_set import open_data  # noqa: PLC0415
        from dsgpt.data.token_file import TokenFileWriter  # noqa: PLC0415

        torch.set_num_threads(1)
        path, draw = self.folder / "train.bin", np.random.default_rng(0)
        with TokenFileWriter(path, vocab_size=VOCABULARY, eot_id=0, tokenizer=None, source="random ids") as writer:
            for _ in range(TOKENS >> 24):
                writer.append(draw.integers(0, VOCABULARY, (1 << 24) - 1))
        self._data = open_data(path, flag="data")
        path.read_bytes()  # into the page cache

    def results(self) -> Iterator[dict[str, Any]]:
        for batch in BATCHES:
            for _, way in frame.turns((OURS, NANOGPT), rounds=self.options.rounds):
                yield {"batch": batch, "way": way, "seconds": self._fetch(batch, way)}
        memory = psutil.Process().memory_full_info  # ``uss`` leaves out pages of files that others may share
        before = memory().uss
        self._fetch(BATCHES[-1], OURS, steps=READ_BYTES // (2 * LENGTH) // BATCHES[-1])
        yield {"growth_bytes": memory().uss - before, "step_sec": step_seconds(BATCHES[1])}

    def _fetch(self, batch: int, way: str, *, steps: int = STEPS) -> float:
        """Processor seconds of a batch."""
        from dsgpt.data.loader import WindowDataset, micro_batches, training_windows  # noqa: PLC0415
        from dsgpt.data.order import RankShare  # noqa: PLC0415

        order = self._data.order(LENGTH, global_batch_size=batch, seed=1)
        share = RankShare(micro_batch_size=batch, gradient_accumulation_steps=1, data_rank=0, data_parallel_size=1)
        windows = training_windows(order, share, range(steps))
        if way == OURS:
            dataset = WindowDataset(self._data, seq_length=LENGTH, vocab_size=VOCABULARY)
            started = time.process_time()
            for _ in micro_batches(dataset, windows, workers=0, pin_memory=False):
                pass
        else:
            starts = [[window * LENGTH for window in batch] for batch in windows]
            started = time.process_time()
            for batch_starts in starts:
                nanogpt_batch(self._data.path, batch_starts)
        return (time.process_time() - started) / steps

    def line(self, result: dict[str, Any], *, count: str, left: str) -> str:
        if "way" not in result:
            return f"{count} a step of tiny: {result['step_sec']:.2f} s{left}"
        return f"{count} {result['batch']} windows, {result['way']}: {result['seconds'] * 1e6:.0f} µs{left}"

    def record(self, results: Sequence[dict[str, Any]]) -> frame.Record:
        *timed, rest = results
        batches: dict[str, Any] = {}
        for batch in BATCHES:
            own = [one for one in timed if one["batch"] == batch]
            ours, theirs = ([one["seconds"] for one in own if one["way"] == way] for way in (OURS, NANOGPT))
            spans = {OURS: frame.span(ours), NANOGPT: frame.span(theirs)}
            batches[str(batch)] = {"seconds": spans, "ratio": frame.ratios(theirs, ours)}
        seconds = batches[str(BATCHES[1])]["seconds"][OURS]["median"]
        return {"rounds": self.options.rounds, "batches": batches, "share": seconds / rest["step_sec"], **rest}

    def failures(self, record: frame.Record) -> list[str]:
        slow = [batch for batch, one in record["batches"].items() if one["ratio"]["median"] < RATIO]
        return [
            *(f"{batch} windows: less than {RATIO:g} times as fast as nanoGPT's way" for batch in slow),
            *(["fetching takes more of a step than the goal"] if record["share"] > SHARE else []),
            *(["private memory grows by more than the goal"] if record["growth_bytes"] > GROWTH else []),
        ]


def nanogpt_batch(path: Path, starts: list[int]) -> Any:
    """Inputs and targets (B, T) of the windows that begin at ``starts``, read as nanoGPT's ``get_batch`` reads them."""
    import numpy as np  # noqa: PLC0415 - as above
    import torch  # noqa: PLC0415

    ids, places = np.memmap(path, dtype=np.uint16, mode="r"), torch.tensor(starts)  # it draws them with torch
    inputs = [torch.from_numpy(ids[first : first + LENGTH].astype(np.int64)) for first in places]
    targets = [torch.from_numpy(ids[first + 1 : first + 1 + LENGTH].astype(np.int64)) for first in places]
    return torch.stack(inputs), torch.stack(targets)


def step_seconds(batch: int) -> float:
    """Processor seconds of the forward and backward pass of `tiny` on ``batch`` windows, the second of two."""
    import torch  # noqa: PLC0415 - as above

    from dsgpt.model.config import PRESETS  # noqa: PLC0415
    from dsgpt.model.gpt2 import GPT2  # noqa: PLC0415

    model, ids = GPT2(PRESETS["tiny"]), torch.randint(VOCABULARY, (batch, LENGTH))
    for _ in range(2):
        started = time.process_time()
        torch.autograd.backward(model(ids, ids))
    return time.process_time() - started
