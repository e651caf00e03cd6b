"""The moments of a step under ZeRO-3. See ``dsgpt.planning.moments`` for the letters."""

from dsgpt.planning.gathering import gathered, most_gathered
from dsgpt.planning.moments import Moment, bucket_bytes, bucket_fills, embedding_bytes
from dsgpt.planning.parameters import EMBEDDING
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import Shards


def zero3(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """Gathered weights, a flat buffer of this rank's gradients, the bucket; in the step a second copy of the gradients.

    Weights that are gathered together stay in the buffer of their all-gather until the last of them has been used: so
    they exist twice during the forward pass, and the embedding once more if it has been freed. On a CPU those that are
    being gathered exist twice as well, because gloo copies them. A full bucket is reduced from a copy in the order of
    the ranks, and gloo makes one more.
    """
    held, layers, zero = setup.held(rank), setup.model.n_layer, setup.recipe.zero_optimization
    shards, embedding = Shards.of(setup, held), embedding_bytes(setup)
    stepped = FULL * (shards.own + max(shards.sub_groups))
    sums = FULL * shards.own
    if setup.recipe.offload_optimizer != "none":  # both copies exist in the host all the time
        sums = stepped = 2 * sums if device == "cpu" else 0
    base = {"gradients": sums, "buckets": bucket_bytes(setup, setup.low)}
    whole = setup.low * most_gathered(setup)
    together = setup.low * min(zero.stage3_prefetch_bucket_size, most_gathered(setup))
    freed = embedding if [part.name for part in gathered(setup)].count(EMBEDDING) > 1 else 0
    buffers = freed + (whole if device == "cpu" else together)
    copies = 2 if device == "cpu" else 1
    found = [
        Moment(name="forward", blocks=layers, parts=base | {"gathered": whole + buffers}),
        Moment(name="loss", blocks=layers, parts=base | {"gathered": whole}),
        Moment(name="backward", blocks=layers, parts=base | {"gathered": whole, "new_gradients": embedding}),
        Moment(name="step", parts=base | {"gradients": stepped}),
        Moment(name="evaluation", parts=base | {"gathered": whole}),
    ]
    for fill in bucket_fills(setup, held):
        buckets = base["buckets"] + copies * setup.low * fill.elements
        waits = 0 if fill.has_embedding else embedding
        parts = {"buckets": buckets, "new_gradients": waits, "gathered": min(whole, embedding)}
        found.append(Moment(name="reduction", blocks=fill.blocks, parts=base | parts))
    return found
