"""The part of ``docs/parity.md`` about how it was measured: bounds, references, launches."""

from typing import Any

from dsgpt.benchmarks.harness.pages import Record, table
from dsgpt.benchmarks.parity.bounds import RATE

WHY = """AdamW's first moment after one step gives the first gradient. SGD has no state. In its first step, the gradient
that it steps on is put where Adam keeps that moment, so that the strategy's own code gathers it."""
WHY_OF_1_0 = """In bf16 every product is rounded to 8 binary digits, and differently for another split of the batch. The
gradients of LayerNorms are small sums that almost cancel and differ most, so they have a separate bound. The keys'
biases have no gradient but rounding (softmax ignores what all keys share), and Adam makes full steps of that, so the
weights are measured together in bf16."""
WHY_OF_1_1 = """The learning rate is the one that every rank's optimizer steps with, in all its parameter groups, read
by PyTorch's hook. The reference computes the rate itself. Every rank validates as the training loop does, after half of
the steps and after the last. The last batch is padded, so ranks and micro batches have unequal numbers of targets, some
of them none. The reference takes the mean over all targets, one sequence after the other.

In bf16 every product is rounded to 8 binary digits, and differently for another split of the batch. So the reference
takes the micro batches of the training that it is compared with, and rounds gradients between ranks where the strategy
is known to do so (ZeRO 0 and 1 once per step, 2 and 3 every micro batch; DDP, FSDP and sequence ranks never)."""
_ROUNDED_ON_CPU = """First gradient and first update are then equal in six digits. There are three exceptions with wider
bounds: tensor and sequence parallelism round other products, a pipeline rounds the tied embedding's gradient
differently, and more than two ranks add up in an undefined order."""
_ROUNDED_ON_CUDA = """Kernels of GPUs add up in other orders, and the effect was not measured yet: the bounds of 16-bit
precisions allow for a different rounding of every product."""
_UNSEEN = """These bounds cannot detect the following: errors in the keys' biases, which are left out of the weights
(softmax ignores what all keys share, so their gradient is only rounding, of which Adam makes full steps); {on_device};
and errors that need more steps than these trainings take. The reference takes token files and the order of samples from
the product, which tests them separately. Of the schedules, the cosine and the constant rate are compared with the
reference's own formula; `WarmupLR` and `WarmupDecayLR` have tests against given values (`tests/optimization`)."""
_UNSEEN_ON_CPU = """in bf16, errors that change loss or weights after the first update by less than one more rounding of
every product; under tensor and sequence parallelism in bf16, a sum in the wrong precision"""
_UNSEEN_ON_CUDA = """in 16-bit precisions, errors that change gradients, loss or weights by less than one more rounding
of every product, for example a sum in the wrong precision or a bias that decays (such bugs are planted on CPUs only)"""


def _why_of_1_1(device: str) -> str:
    """How far 16-bit trainings are from the reference depends on the device, and so does what cannot be seen."""
    on_cpu = device == "cpu"
    rounded = _ROUNDED_ON_CPU if on_cpu else _ROUNDED_ON_CUDA
    unseen = _UNSEEN.format(on_device=_UNSEEN_ON_CPU if on_cpu else _UNSEEN_ON_CUDA)
    return f"{WHY_OF_1_1} {rounded}\n\n{unseen}"


def method(record: Record) -> str:
    """``## How it is measured`` and all below it.

    Args:
        record: as ``dsgpt.benchmarks.parity.record`` makes it.
    """
    parts = [
        _work(record["work"]),
        _bounds(record),
        WHY,
        WHY_OF_1_0 if record["schema_version"] == "1.0" else _why_of_1_1(record["hardware"]["device"]),
        _references(record),
        _launches(record),
        """Every cell is trained in its own processes, with a new process group. On GPUs each of them is a new Python.
On a CPU they are forked after the imports. On 2 ranks, each rank is forked from a Python of its own; on more ranks, all
are forked from one. So differences between Pythons, such as the order of sets, are tested only on 2 ranks and on
GPUs.""",
    ]
    return "\n\n".join(parts)


def _work(work: dict[str, Any]) -> str:
    shape = work["model"]
    return f"""## How it is measured

Every training takes {work["steps"]} optimizer steps of {work["global_batch_size"]} sequences of
{work["seq_len"]} tokens of real text, in real processes started by `deepspeed`, `torchrun` or `python`, through the
code behind `src/gpt2.py` and the shipped recipes. The model has {shape["num_layers"]} layers, {shape["num_heads"]}
heads and width {shape["embedding_size"]}; buckets and thresholds are so small that it fills several. Warm-up is 2
steps, dropout 0. The reference is one process of plain PyTorch (`src/dsgpt/benchmarks/parity/reference.py`): the model,
`torch.optim`, `clip_grad_norm_` and, in fp32, the whole global batch at once. It uses no code of the strategies. If
gradients have a wrong scale, the loss shows it under SGD but not under AdamW. SGD without clipping shows it even if
they are scaled after the norm was read."""


def _bounds(record: Record) -> str:
    """The table of bounds: a column for each kind of arithmetic; kinds with the same bounds share one."""
    work, columns = record["work"], _columns(record["bounds"])
    values = [bounds for _, bounds in columns]
    rate = "equal" if record["schema_version"] == "1.0" else f"{RATE:g}"
    return table(["fact", *(name for name, _ in columns)], _bound_rows(values, rate=rate, steps=work["steps"]))


def _bound_rows(values: list[dict[str, Any]], *, rate: str, steps: int) -> list[list[str]]:
    return [
        ["loss, every step", *(f"{one['loss']:g}" for one in values)],
        ["validation loss, after half of the steps and all", *map(_validation, values)],
        ["gradient norm, every step, relative", *(f"{one['norm']:g}" for one in values)],
        ["learning rate, every step", *(rate for _ in values)],
        ["first step's gradient, every parameter, relative L2", *map(_gradient, values)],
        ["first update: weights after it, relative L2", *map(_update, values)],
        [f"weights after {steps} steps, relative L2", *map(_weights, values)],
        ["samples that the data ranks took, every step", *("equal" for _ in values)],
        ["weights that ranks hold whole", *("equal bits" for _ in values)],
    ]


def _columns(bounds: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for name, one in bounds.items():
        if found and found[-1][1] == one:
            found[-1] = (f"{found[-1][0]}; {name}", one)
        else:
            found.append((name, one))
    return found


def _validation(bounds: dict[str, Any]) -> str:
    return f"{bounds['validation']:g}" if "validation" in bounds else "not measured"


def _gradient(bounds: dict[str, Any]) -> str:
    special = {"LayerNorms": bounds["layer_norm_gradient"], "tied embedding": bounds.get("tied_gradient")}
    return _with_special(bounds["gradient"], special)


def _update(bounds: dict[str, Any]) -> str:
    if "update" not in bounds:
        return "not measured"
    return f"{_with_special(bounds['update'], {'tied embedding': bounds['tied_update']})}, every parameter"


def _weights(bounds: dict[str, Any]) -> str:
    return f"{bounds['weights']:g}, {'all together' if bounds.get('weights_together') else 'every parameter'}"


def _with_special(usual: float, special: dict[str, float | None]) -> str:
    others = [f"{name} {value:g}" for name, value in special.items() if value not in {None, usual}]
    return "; ".join([f"{usual:g}", *others])


def _references(record: Record) -> str:
    return table(
        [
            "reference",
            "loss, first step",
            "loss, last step",
            "validation, last",
            "smallest gradient norm",
            "clipped at",
        ],
        [
            [
                _reference_name(item),
                f"{item['first_loss']:.4f}",
                f"{item['last_loss']:.4f}",
                f"{item['last_validation_loss']:.4f}" if "last_validation_loss" in item else "not measured",
                f"{item['smallest_grad_norm']:.3f}",
                item["clipping"] or "not clipped",
            ]
            for item in record["references"]
        ],
    )


def _reference_name(item: dict[str, Any]) -> str:
    """The settings of a reference. Records before version 1.1 have one reference for all splits of the batch."""
    words = [item["optimizer"], item["precision"], item["training"]]
    if item["precision"] != "fp32" and "data_ranks" in item:
        words += [f"data ranks {item['data_ranks']}", f"accumulation {item['accumulation']}"]
        words.append(f"gradients rounded: {item['low']}" if item["low"] else "gradients not rounded")
    return ", ".join(filter(None, words))


def _launches(record: Record) -> str:
    return table(
        ["launcher", "ranks", "cells", "seconds until the ranks work", "seconds in all"],
        [
            [item["launcher"], item["ranks"], item["cells"], item["start_seconds"], item["seconds"]]
            for item in record["launches"]
        ],
    )
