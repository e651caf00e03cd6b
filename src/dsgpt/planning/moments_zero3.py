"""The moments of a step under ZeRO-3. See ``dsgpt.planning.moments`` for the letters."""

from dsgpt.planning.gathering import most_gathered
from dsgpt.planning.moments import Moment, bucket_bytes, bucket_fills, embedding_bytes
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import Shards


def zero3(setup: Setup, rank: int, *, device: str) -> list[Moment]:
    """Gathered weights, a flat buffer of this rank's gradients, the bucket; in the step a second copy of the gradients.

    Weights that are gathered together stay in the buffer of their all-gather until the last of them has been used: so
    they exist twice at the end of the forward pass. A full bucket is reduced from a copy in the order of the ranks; on
    a CPU gloo makes one more.
    """
    held, layers, zero = setup.held(rank), setup.model.n_layer, setup.recipe.zero_optimization
    shards, embedding = Shards.of(setup, held), embedding_bytes(setup)
    offloaded = device == "cuda" and setup.recipe.offload_optimizer != "none"
    sums = 0 if offloaded else FULL * shards.own
    base = {"gradients": sums, "buckets": bucket_bytes(setup, setup.low)}
    gathered = setup.low * most_gathered(setup)
    in_flight = setup.low * min(zero.stage3_prefetch_bucket_size, most_gathered(setup))
    copies = 2 if device == "cpu" else 1
    found = [
        Moment(name="forward", blocks=layers, parts=base | {"gathered": gathered + in_flight}),
        Moment(name="loss", blocks=layers, parts=base | {"gathered": gathered}),
        Moment(name="backward", blocks=layers, parts=base | {"gathered": gathered, "new_gradients": embedding}),
        Moment(name="step", parts=base | {"gradients": sums + FULL * max(shards.sub_groups)}),
    ]
    for fill in bucket_fills(setup, held):
        buckets = base["buckets"] + copies * setup.low * fill.elements
        waits = 0 if fill.has_embedding else embedding
        parts = {"buckets": buckets, "new_gradients": waits, "gathered": min(gathered, embedding)}
        found.append(Moment(name="reduction", blocks=fill.blocks, parts=base | parts))
    return found
