"""The strategies under test: each is a shipped recipe, or one with a setting changed."""

from dataclasses import dataclass, field, replace
from typing import Any

ACCUMULATED, EVERY = "accumulated", "every micro batch"
"""Where a strategy rounds gradients to the low precision between ranks: the sums of all micro batches once per step, or
those of every micro batch."""


@dataclass(frozen=True, kw_only=True)
class TestedStrategy:
    """A strategy under test: how it is started, with which recipe, on how many ranks."""

    name: str
    """As ``RunConfig.strategy_name`` has it, with a suffix where a setting of the recipe is varied."""
    run_type: str
    recipe: str
    """The shipped recipe that it starts from, a file of ``ds_configs/``."""
    ranks: tuple[int, ...]
    launcher: str = "deepspeed"
    changes: dict[str, Any] = field(default_factory=dict)
    """What to change in the recipe, block by block; None removes a key."""
    training: str = ""
    """A key of ``TRAININGS``: changes of the recipe that are also made for its reference."""
    replicas: str = "all"
    """How much every rank holds whole: ``all`` weights, ``some``, or ``none``."""
    model_ranks: int = 1
    """Ranks that share a micro batch: each computes a part of the model, or a part of every sequence."""
    low: str = ""
    """Where its gradients are rounded to the low precision between ranks: ``ACCUMULATED``, ``EVERY``, or empty."""
    low_alone: bool = True
    """Whether a single rank, which sends nothing, rounds them all the same."""
    whole: bool = True
    """Whether it has a cell for every setting; otherwise it has one cell."""
    optimizer: str = "adamw"
    """The optimizer of that one cell."""
    precision: str = "fp32"
    """The precision of that one cell."""
    refused: bool = False
    """Whether the product must refuse it under every setting."""
    fp32_only: bool = False
    """Whether the product must refuse it in bf16 and fp16."""
    compiles: bool = True
    """Whether it trains with ``--compile``; otherwise the product must refuse the flag."""


TRAININGS: dict[str, dict[str, Any]] = {
    "": {},
    "unclipped": {"gradient_clipping": 0},
    "unclipped sgd": {"gradient_clipping": 0, "optimizer": {"params": {"lr": 0.25}}},
    "constant rate": {"scheduler": None},
    "momentum": {"optimizer": {"params": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}}},
}
"""Changes of the recipe that change what is computed, so that the reference needs them too."""


def _zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


def _deepspeed(name: str, recipe: str, *, ranks: tuple[int, ...] = (1, 2, 4), **more: Any) -> TestedStrategy:
    """ZeRO. From stage 2 on, a rank keeps no whole gradient from one micro batch to the next."""
    low = EVERY if recipe.startswith(("zero2", "zero3")) else ACCUMULATED
    settings: dict[str, Any] = {"low": low, "low_alone": recipe != "zero1"} | more
    return TestedStrategy(name=name, run_type="optimized", recipe=f"{recipe}.json", ranks=ranks, **settings)


def _sharded(name: str, recipe: str, **more: Any) -> TestedStrategy:
    """ZeRO-3, whose gathers the compiler cannot trace."""
    return _deepspeed(name, recipe, replicas="some", compiles=False, **more)


def _split(name: str, recipe: str, stage: int, *, ranks: tuple[int, ...] = (2, 4), **more: Any) -> TestedStrategy:
    """A model or sequences split over ranks, at one ZeRO stage. Sequence ranks reduce gradients in fp32."""
    low = "" if recipe == "sequence" else EVERY if stage >= 2 else ACCUMULATED
    shared = {"model_ranks": 4 if recipe == "3d" else 2, "low": low}
    return _deepspeed(name, recipe, ranks=ranks, changes=_zero(stage), compiles=False, **shared, **more)


def _torch(name: str, *, ranks: tuple[int, ...] = (1, 2, 4), **more: Any) -> TestedStrategy:
    return TestedStrategy(
        name=name,
        run_type=name.split("-", maxsplit=1)[0],
        recipe="zero1.json",
        ranks=ranks,
        launcher="torchrun",
        **more,
    )


def _varied(name: str, *changed: tuple[str, str, str, dict[str, Any]]) -> list[TestedStrategy]:
    """One cell for each of (suffix, recipe, block, keys of that block)."""
    return [
        _deepspeed(f"{name}-{suffix}", recipe, ranks=(2,), changes={block: keys}, whole=False)
        for suffix, recipe, block, keys in changed
    ]


_TORCH = (
    TestedStrategy(name="baseline", run_type="baseline", recipe="zero1.json", ranks=(1,), launcher="python"),
    _torch("ddp"),
    _torch("ddp-copied-buckets", ranks=(2,), changes={"dsgpt": {"ddp": {"gradient_as_bucket_view": False}}}),
    _torch("fsdp", replicas="none"),
    _torch("fsdp-kept", ranks=(2,), replicas="none", changes={"dsgpt": {"fsdp": {"reshard_after_forward": False}}}),
    _torch("fsdp-offload", ranks=(2,), replicas="none", changes={"dsgpt": {"fsdp": {"cpu_offload": True}}}),
)
_DATA_PARALLEL = (
    *(_deepspeed(f"zero{stage}", f"zero{stage}") for stage in (0, 1, 2)),
    _sharded("zero3", "zero3"),
    _deepspeed("zero2-offload", "zero2_offload"),
    _sharded("zero3-offload", "zero3_offload"),
    _sharded("zero3-nvme", "zero3_nvme"),
)
_SPLIT = (
    *(_split(f"tensor2-zero{stage}", "tensor", stage, replicas="some") for stage in (0, 1, 2)),
    _split("pipeline2-zero0", "pipeline", 0, replicas="some", fp32_only=True),
    _split("pipeline2-zero1", "pipeline", 1, replicas="some"),
    *(_split(f"sequence2-zero{stage}", "sequence", stage) for stage in (0, 1, 2)),
    _split("sequence2-zero3", "sequence", 3, replicas="some"),
    _split("pipeline2-tensor2-zero1", "3d", 1, ranks=(8,), replicas="some"),
    _split("pipeline2-tensor2-zero0", "3d", 0, ranks=(8,), replicas="some", whole=False),
)
_REFUSED = (
    _split("tensor2-zero3", "tensor", 3, ranks=(2,), whole=False, refused=True),
    _split("pipeline2-zero2", "pipeline", 2, ranks=(2,), whole=False, refused=True),
    _split("pipeline2-zero3", "pipeline", 3, ranks=(2,), whole=False, refused=True),
)
_WITHOUT_CLIPPING = (
    *("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"),
    *("tensor2-zero1", "pipeline2-zero0", "pipeline2-zero1", "sequence2-zero1"),
)
"""Strategies that are also trained with SGD and no clipping. That shows whether gradients are scaled wrongly after
the reported norm was read: clipping would undo the wrong scale."""


def _unclipped_sgd(strategy: TestedStrategy) -> TestedStrategy:
    return replace(
        strategy,
        name=f"{strategy.name}-unclipped-sgd",
        ranks=(2,),
        training="unclipped sgd",
        optimizer="sgd",
        whole=False,
    )


_OTHER_TRAININGS = (
    _torch("ddp-unclipped", ranks=(2,), training="unclipped", whole=False),
    _deepspeed("zero1-unclipped", "zero1", ranks=(2,), training="unclipped", whole=False),
    *map(_unclipped_sgd, (one for one in (*_TORCH, *_DATA_PARALLEL, *_SPLIT) if one.name in _WITHOUT_CLIPPING)),
    _deepspeed("zero1-constant-rate", "zero1", ranks=(2,), training="constant rate", whole=False),
    _deepspeed("zero1-momentum", "zero1", ranks=(2,), training="momentum", whole=False, optimizer="sgd"),
)
_OTHER_SETTINGS = (
    *_varied(
        "zero2",
        ("whole-reduction", "zero2", "zero_optimization", {"reduce_scatter": False}),
        ("scattered-gradients", "zero2", "zero_optimization", {"contiguous_gradients": False}),
        ("bucket-per-rank", "zero2", "zero_optimization", {"use_multi_rank_bucket_allreduce": False}),
        ("overlap", "zero2", "zero_optimization", {"overlap_comm": True}),
        ("offload-torch-adam", "zero2_offload", "optimizer", {"params": {"torch_adam": True}}),
    ),
    *_varied("zero1", ("offload", "zero1", "zero_optimization", {"offload_optimizer": {"device": "cpu"}})),
    *(
        _sharded(f"zero3-{suffix}", recipe, ranks=(2,), changes={"zero_optimization": changes}, whole=False)
        for suffix, recipe, changes in (
            ("overlap", "zero3", {"overlap_comm": True}),
            ("offload-weights", "zero3_offload", {"offload_optimizer": None}),
            ("offload-optimizer", "zero3_offload", {"offload_param": None}),
        )
    ),
    _deepspeed(
        "zero1-immediate-update",
        "zero1",
        ranks=(2,),
        changes={"bf16": {"enabled": True, "immediate_grad_update": True}},
        whole=False,
        precision="bf16",
    ),
)

STRATEGIES = {
    strategy.name: strategy
    for strategy in (*_TORCH, *_DATA_PARALLEL, *_SPLIT, *_REFUSED, *_OTHER_TRAININGS, *_OTHER_SETTINGS)
}
"""By name, in the order in which the suite runs and shows them."""
