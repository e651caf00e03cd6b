"""The figures of a record's epochs, of which some may be unknown."""

from dsgpt.reports.fields import Fields

FLAT_KEYS = (
    "train_time_per_epoch",
    "train_loss_per_epoch",
    "val_loss_per_epoch",
    "train_throughput",
    "inference_latency",
    "inference_throughput",
)
"""Of the older generation of records."""


class Epochs:
    """Values per epoch, from ``epochs`` if it has any, otherwise from the flat keys."""

    def __init__(self, record: Fields, *, notes: list[str]) -> None:
        epochs = record.sections("epochs")
        self.steps = [epoch.number("optimizer_steps") for epoch in epochs]
        self.tokens = [epoch.number("tokens_processed_global") for epoch in epochs]
        self.train_losses = [epoch.number("train_loss_avg_global") for epoch in epochs] or record.series(FLAT_KEYS[1])
        self.val_losses = [epoch.number("val_loss_avg_global") for epoch in epochs] or record.series(FLAT_KEYS[2])
        self.times = record.series("train_time_per_epoch")
        self.count = max(len(self.train_losses), len(self.val_losses))
        if not record.is_list("train_time_per_epoch") and self.times and self.count > 1:
            notes.append(f"train_time_per_epoch is one number for {self.count} epochs: the training time is unknown")
            self.times = []
        self.train_time = total(self.times)
        self.throughput = mean_rate(record.series("train_throughput"), times=self.times)
        if self.throughput is not None and record.raw("schema_version") is None:
            notes.append("train_throughput of the older generation names no unit: taken as tokens per second")


def first(*values: float | None) -> float | None:
    """The first known value."""
    return next((value for value in values if value is not None), None)


def last(values: list[float | None]) -> float | None:
    """The value of the last epoch, even if unknown: the loss of an earlier epoch is not the final one."""
    return values[-1] if values else None


def total(values: list[float | None]) -> float | None:
    """The sum; None if any value is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def mean(values: list[float | None]) -> float | None:
    """Of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def mean_rate(rates: list[float | None], *, times: list[float | None]) -> float | None:
    """Mean rate over the epochs, weighted by their seconds if both are known for each epoch."""
    if len(rates) == len(times) and (all_seconds := total(times)):
        pairs = zip(rates, times, strict=True)
        amounts = [rate * seconds for rate, seconds in pairs if rate is not None and seconds is not None]
        if len(amounts) == len(rates):
            return sum(amounts) / all_seconds
    return mean(rates)


def lowest(values: list[float | None]) -> float | None:
    """The smallest of the known values; None if there is none."""
    return min((value for value in values if value is not None), default=None)
