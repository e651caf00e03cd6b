"""The moments of a step under the strategies of PyTorch. See ``dsgpt.planning.moments`` for the letters."""

from itertools import pairwise

from dsgpt.planning.moments import Moment, embedding_bytes
from dsgpt.planning.parameters import ParameterSize, model_parameters, total
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import fsdp_elements


def baseline(setup: Setup, *, device: str) -> list[Moment]:
    """Sums in fp32 of several micro batches: 4P. A micro batch's gradients: wP, the embedding's twice for a moment.

    In bf16 and fp16 they are added to the sums when all exist. On a CPU, adding casts each of them to fp32 first.
    """
    layers, held = setup.model.n_layer, setup.held(0)
    new, embedding, several = setup.low * total(held), embedding_bytes(setup), setup.gradient_accumulation_steps > 1
    sums, separate = FULL * total(held), setup.low != FULL
    earlier = sums if several else 0
    backward = 2 * embedding if several and not separate else new + embedding
    cast = FULL * setup.model.largest_parameter() if several and separate and device == "cpu" else 0
    return [
        Moment(name="loss", blocks=layers, parts={"gradients": earlier}),
        Moment(name="backward", blocks=layers, parts={"gradients": earlier, "new_gradients": embedding}),
        Moment(name="reduction", parts={"gradients": earlier, "new_gradients": backward}),
        Moment(name="step", parts={"gradients": sums, "new_gradients": new if separate else 0, "other": cast}),
        Moment(name="evaluation", parts={}),
    ]


def ddp(setup: Setup, *, device: str) -> list[Moment]:  # noqa: ARG001 - of all strategies
    """Buckets for all gradients: wP, besides sums in fp32 of several micro batches: 4P.

    A bucket is reduced in fp32. Its copy replaces the sum of its gradients, if there is one, when it is complete.
    """
    layers, held = setup.model.n_layer, setup.held(0)
    embedding, several = embedding_bytes(setup), setup.gradient_accumulation_steps > 1
    buckets, separate = setup.low * total(held), setup.low != FULL
    if not setup.recipe.dsgpt.ddp.gradient_as_bucket_view:
        buckets *= 2
    earlier = {"buckets": buckets, "gradients": FULL * total(held) if several else 0}
    reduced = FULL * (_last_bucket(setup, held) if several else total(held)) if separate else 0
    pending = embedding if separate else 2 * embedding
    last = earlier | {"new_gradients": pending, "other": reduced}
    stepped = earlier | {"gradients": FULL * total(held) if separate or several else 0}
    return [
        Moment(name="loss", blocks=layers, parts=earlier),
        Moment(name="backward", blocks=layers, parts=earlier | {"new_gradients": embedding}),
        Moment(name="reduction", parts=last),
        Moment(name="step", parts=stepped),
        Moment(name="evaluation", parts={"buckets": buckets}),
    ]


def _last_bucket(setup: Setup, held: list[ParameterSize]) -> int:
    """Elements of DDP's last bucket, which has the embedding. A bucket ends as soon as it has its size."""
    limit = setup.recipe.dsgpt.ddp.bucket_cap_mb * 2**20 / setup.low
    elements = 0
    for part, following in pairwise([*reversed(held), None]):
        assert part is not None
        elements += part.numel
        if elements >= limit and following is not None:
            elements = 0
    return elements


def fsdp(setup: Setup, *, device: str) -> list[Moment]:
    """The root's weights whole, those of a block and of the next one; whole gradients until the last micro batch.

    A block's gradients are reduced from a buffer that is freed when those of the next block are reduced. On a CPU, gloo
    copies what it gathers and scatters.
    """
    ranks, layers, recipe = setup.world_size, setup.model.n_layer, setup.recipe.dsgpt.fsdp
    root, block = _whole_elements(setup)
    several, copies = setup.gradient_accumulation_steps > 1, 1 if device == "cpu" else 0
    width = FULL if recipe.reduce_dtype == "fp32" else setup.low
    embedding = embedding_bytes(setup)
    away = recipe.cpu_offload and device == "cuda"
    shards, root_shard = (0, 0) if away else (FULL * layers * block // ranks, FULL * root // ranks)
    kept = layers if not recipe.reshard_after_forward else 1
    earlier = width * (layers * block + root) if several else 0
    flight = 0 if not recipe.reshard_after_forward else (1 + copies) * block
    gathered = setup.low * (root + kept * block + flight)
    one_less = width * ((layers - 1) * block + root) if several else 0
    return [
        Moment(name="loss", blocks=layers, parts={"gradients": earlier, "gathered": setup.low * (root + kept * block)}),
        Moment(
            name="backward",
            blocks=layers - 1,
            parts={
                "gradients": one_less + FULL * block // ranks,
                "gathered": gathered,
                "buckets": width * block,
                "new_gradients": embedding,
            },
        ),
        Moment(
            name="reduction",
            parts={
                "gradients": shards + (width * root if several else 0),
                "gathered": setup.low * root,
                "buckets": width * block,
                "new_gradients": 2 * embedding,
            },
        ),
        Moment(
            name="step",
            parts={"gradients": shards + root_shard, "buckets": (1 + copies) * width * root},
        ),
        Moment(name="evaluation", parts={"gathered": setup.low * (root + kept * block)}),
    ]


def _whole_elements(setup: Setup) -> tuple[int, int]:
    """Elements of the root's parameters and of a block's, with FSDP's padding."""
    ranks, whole = setup.world_size, model_parameters(setup.model)
    root = [part for part in whole if not part.name.startswith("blocks.")]
    block = [part for part in whole if part.name.startswith("blocks.0.")]
    return ranks * fsdp_elements(root, ranks), ranks * fsdp_elements(block, ranks)
