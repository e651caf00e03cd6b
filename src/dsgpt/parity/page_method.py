"""The part of ``docs/parity.md`` that says how it was measured: bounds, references, launches."""

from typing import Any

from dsgpt.parity.table import table

WHY = """AdamW's first moment after one step gives the first gradient. SGD has no state; in its first step, the gradient
that it steps on is put where Adam keeps that moment, so that the strategy's own code brings it whole.

In bf16 every product is rounded to 8 binary digits, and otherwise for another split of the batch. The gradients of
LayerNorms are small sums that almost cancel and differ most, so they have a bound of their own. The keys' biases have
no gradient but rounding (softmax ignores what all keys share), and Adam makes full steps of that, so the weights are
measured together in bf16."""


def method(record: dict[str, Any]) -> str:
    """``## How it is measured`` and all below it.

    Args:
        record: as ``dsgpt.parity.record`` makes it.
    """
    parts = [
        _work(record["work"]),
        _bounds(record),
        WHY,
        _references(record),
        _launches(record),
        """A launch imports everything once; every cell is then trained in processes forked from it (on GPUs: in new
interpreters), with a process group of its own.""",
    ]
    return "\n\n".join(parts)


def _work(work: dict[str, Any]) -> str:
    shape = work["model"]
    return f"""## How it is measured

Every training takes {work["steps"]} optimizer steps of {work["global_batch_size"]} sequences of
{work["seq_len"]} tokens of real text, in real processes started by `deepspeed`, `torchrun` or `python`, through the
code behind `src/gpt2.py` and the shipped recipes. The model has {shape["num_layers"]} layers, {shape["num_heads"]}
heads and width {shape["embedding_size"]}; buckets and thresholds are so small that it fills several. Warm-up is 2
steps, dropout 0. The reference is one process of plain PyTorch (`src/dsgpt/parity/reference.py`): the model,
`torch.optim`, `clip_grad_norm_` and the whole global batch at once. It knows nothing of strategies, ranks or
accumulation. AdamW hides a wrong scale of the gradients from the loss, SGD shows it."""


def _bounds(record: dict[str, Any]) -> str:
    work, bounds = record["work"], record["bounds"]
    high, low = bounds["fp32"], bounds["bf16"]
    return table(
        ["fact", "fp32", "bf16, fp16"],
        [
            ["loss, every step", f"{high['loss']:g}", f"{low['loss']:g}"],
            ["gradient norm, every step, relative", f"{high['norm']:g}", f"{low['norm']:g}"],
            ["learning rate, every step", "equal", "equal"],
            [
                "first step's gradient, every parameter, relative L2",
                f"{high['gradient']:g}",
                f"{low['gradient']:g}; LayerNorms {low['layer_norm_gradient']:g}",
            ],
            [
                f"weights after {work['steps']} steps, relative L2",
                f"{high['weights']:g}, every parameter",
                f"{low['weights']:g}, all together",
            ],
            ["samples that the data ranks took, every step", "equal", "equal"],
            ["weights that ranks hold whole", "equal bits", "equal bits"],
        ],
    )


def _references(record: dict[str, Any]) -> str:
    return table(
        ["reference", "loss, first step", "loss, last step", "smallest gradient norm", "clipped at"],
        [
            [
                ", ".join(filter(None, [item["optimizer"], item["precision"], item["training"]])),
                f"{item['first_loss']:.4f}",
                f"{item['last_loss']:.4f}",
                f"{item['smallest_grad_norm']:.3f}",
                item["clipping"] or "not clipped",
            ]
            for item in record["references"]
        ],
    )


def _launches(record: dict[str, Any]) -> str:
    return table(
        ["launcher", "ranks", "cells", "seconds until the ranks work", "seconds in all"],
        [
            [item["launcher"], item["ranks"], item["cells"], item["start_seconds"], item["seconds"]]
            for item in record["launches"]
        ],
    )
