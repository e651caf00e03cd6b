"""Predicts the seconds of an optimizer step and of a whole training, and fits the rates of a machine to measured steps.

Computation hides a part of a step's collective operations. What overlaps on GPUs, by strategy:

* ``ddp``: gradients, with the backward pass of the last micro batch, except those of the embedding, which come last.
* ``fsdp``: weights of the next block and gradients of the previous one, with the computation of a block.
* ZeRO 1 and 2: gradients, with the backward pass, if ``overlap_comm`` is true; weights never.
* ZeRO 3: weights and gradients, if ``overlap_comm`` is true.
* ZeRO 0, tensor, sequence and pipeline parallelism: nothing.

On a CPU nothing overlaps: the thread that sends needs the core that computes.

The seconds of an optimizer step are a roofline of every operation, from the rates of a machine. Each block, the
head with its loss, each collective operation, and the optimizer take the time of their FLOPs and bytes at the
machine's rates, plus a constant for every operation. ``dsgpt.planner.step_time`` says which communication overlaps
with computation. In a pipeline of p stages, a step takes as long as the slowest one needs for all m micro batches, and
the p - 1 others for one each. These are the bubble (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
``--compile`` is not modelled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsgpt.machine.topology import ring_factor
from dsgpt.planner.formulas import CHUNK, copied, plain_loss, step_traffic, strategy_of, stream_bytes
from dsgpt.planner.options import PlanOptions
from dsgpt.planner.pytorch_formulas import Traffic
from dsgpt.planner.rates import Machine, Rates, at_ranks, on_grid
from dsgpt.planner.setup import FULL, Setup, model_parameters, total

# What a rank computes in a micro batch: FLOPs, bytes and operations of a block, of the head and of the embedding.
# Letters: M tokens of a micro batch on a rank, T tokens of a sequence, C width, V vocabulary, t tensor ranks, w bytes
# of a number in the precision of the activations. A stream is the residual stream of a micro batch, wMC bytes.

_STREAMS = {
    "fused": {"forward": (10, 10, 14), "backward": (18, 25, 26)},
    "compiled": {"forward": (8, 10, 10), "backward": (14, 25, 20)},
    "eager": {"forward": (15, 80, 34), "backward": (23, 120, 60)},
}
"""Kernels -> what a block reads and writes in each pass: streams, streams that tensor ranks divide, operations.

``compiled``: the LayerNorm after a residual sum does not read it again, 1 each. ``eager`` is Hugging Face's GPT-2:
GELU is eight operations on four streams, 72 forward and 104 backward; two dropouts on the residual stream, 2.5 each;
heads are copied into place."""
_SCORES = {"fused": {"forward": 6, "backward": 9}, "eager": {"forward": 11, "backward": 13}}
"""Passes over stored scores. Forward: the product writes them; the softmax, with scale and mask, reads and writes;
dropout reads and writes; the product with the values reads. ``eager`` scales and masks apart, 2 and 3. Backward: two
products write and read, dropout reads and writes, the softmax reads twice and writes, two products read."""


@dataclass(frozen=True, kw_only=True)
class OpCounts:
    """Operations of a device; the parts run one after another."""

    matrix_flops: float = 0.0
    matrix_bytes: float = 0.0
    """Read and written by the matrix products: factors and results, once each."""
    attention_flops: float = 0.0
    elementwise_bytes: float = 0.0
    logits: float = 0.0
    kernels: int = 0
    waits: int = 0
    """Operations of blocks, which the host starts one by one; see ``Rates.host_apart``."""

    def __add__(self, other: "OpCounts") -> "OpCounts":
        return OpCounts(**{name: value + vars(other)[name] for name, value in vars(self).items()})

    def times(self, count: float) -> "OpCounts":
        """Counts of ``count`` repetitions."""
        return OpCounts(**{name: value * count for name, value in vars(self).items()})

    def seconds(self, rates: Rates, setup: Setup) -> float:
        """The time of all parts. Matrix products take the longer of computing and reading (a roofline)."""
        precision, model = setup.precision, setup.model
        # of a square with as many weights as a rank has, or the model's where its matrices were fitted so
        width = model.n_embd if rates.half_width else model.n_embd / math.sqrt(setup.sizes.tensor)
        matrix = on_grid(rates.matrix[precision], width, setup.tokens) * width / (width + rates.half_width)
        matrix *= setup.tokens / (setup.tokens + rates.half_rows * setup.sizes.tensor)
        head_size, length = model.n_embd // model.n_head, max(1, round(setup.attended or setup.seq_length))
        attention = on_grid(rates.attention[precision], head_size, length)
        if setup.attention == "stored":  # two products as any other
            attention = matrix if head_size % 8 == 0 or precision == "fp32" else matrix / rates.odd_heads
        device = (
            max(self.matrix_flops / matrix, self.matrix_bytes / rates.memory)
            + self.attention_flops / attention
            + self.elementwise_bytes / rates.elementwise[precision]
            + self.logits / rates.logits[precision]
            + self.kernels * rates.kernel_sec
        )
        waits = rates.host_apart or setup.sizes.tensor > 1 or setup.kernels == "eager"
        return max(device, self.waits * rates.host_sec) if waits else device


def block_forward(setup: Setup) -> OpCounts:
    """A block's forward pass: 24MC²/t FLOPs of matrices, 2MTC/t of causal attention, 10 + 10/t streams.

    Streams read and written: 2 by each LayerNorm, 3 by each residual sum, 8/t by GELU, 2/t by the transposed output of
    attention. The layers of tensor ranks add their biases after the product, 4 + 14/t. Sequence ranks arrange the
    tensors of four all-to-alls before and after each, 16. ``_STREAMS`` has the counts of other kernels. Attention that
    stores its scores computes the masked half as well, and passes ``_SCORES`` over them.
    """
    model, tokens, tensor = setup.model, setup.tokens, setup.sizes.tensor
    stream = stream_bytes(setup)
    matrices = 12 * model.n_embd**2 // tensor
    biases = 4 + 14 / tensor if tensor > 1 else 0
    arranged = 16 if setup.sizes.sequence > 1 else 0
    whole, split, kernels = _STREAMS[setup.kernels]["forward"]
    scores = score_bytes(setup, "forward")
    return OpCounts(
        matrix_flops=2 * matrices * tokens,
        matrix_bytes=setup.low * matrices + stream * (4 + 12 / tensor),
        attention_flops=(4 if scores else 2) * tokens * (setup.attended or setup.seq_length) * model.n_embd / tensor,
        elementwise_bytes=stream * (whole + split / tensor + biases + arranged) + scores,
        kernels=kernels,
        waits=kernels,
    )


def block_backward(setup: Setup) -> OpCounts:
    """A block's backward pass: twice the matrices, 2.5 times the attention, 18 + 25/t streams.

    Attention multiplies five times instead of twice, because it computes its scores again (FlashAttention, Dao et al.
    2022, algorithm 4). Streams: 5 by each LayerNorm, 3 by each sum of gradients, 12/t by GELU, 6/t to join the
    gradients of queries, keys and values. 2 + 7/t are for the sums that are the gradients of biases, 16 around the
    all-to-alls of sequence ranks.
    """
    forward, tensor = block_forward(setup), setup.sizes.tensor
    arranged = 16 if setup.sizes.sequence > 1 else 0
    whole, split, kernels = _STREAMS[setup.kernels]["backward"]
    scores = score_bytes(setup, "backward")
    return OpCounts(
        matrix_flops=2 * forward.matrix_flops,
        matrix_bytes=2 * forward.matrix_bytes,
        attention_flops=(2 if scores else 2.5) * forward.attention_flops,
        elementwise_bytes=stream_bytes(setup) * (whole + split / tensor + arranged) + scores,
        kernels=kernels,
        waits=kernels,
    )


def score_bytes(setup: Setup, which: str) -> float:
    """Bytes that a block's attention reads and writes of stored scores, M x T x heads / t; 0 if it stores none.

    Each pass is w bytes a score, and a byte more where a dropout mask is read or written.
    """
    return float(setup.scores * (setup.low * _SCORES["eager" if setup.kernels == "eager" else "fused"][which] + 1))


def head_and_loss(setup: Setup, *, kind: str) -> OpCounts:
    """The head, the loss and their gradients: 6MCV/t FLOPs, all in the forward pass.

    The gradient of the head is added up over chunks of tokens, in low precision through fp32; then the gradient of the
    lookup, which has its size too, is set to zero, filled and added.

    Args:
        setup: the training.
        kind: ``cpu`` or ``cuda``, on which the size of a chunk depends.
    """
    model, tokens, low = setup.model, setup.tokens, setup.low
    head = setup.embedding_elements
    logits = tokens * model.vocab_size / setup.sizes.tensor
    chunks = 1 if kind != "cpu" and plain_loss(setup) else math.ceil(logits / CHUNK[kind])
    summing = chunks * (2 * low + 2 * FULL) + FULL + low if chunks > 1 and low != FULL else 0
    return OpCounts(
        matrix_flops=6 * head * tokens,
        matrix_bytes=3 * low * (head + logits),
        elementwise_bytes=head * (summing + 4 * low),
        logits=logits,
        kernels=12 * chunks,
    )


# What it sends, and the time of all that.


def sending_sec(setup: Setup, rates: Rates, traffic: Traffic, *, devices: int, kind: str) -> float:
    """Seconds of all operations of ``traffic`` in a step: a start of each, and its bytes inside a machine or beyond.

    Machines take the ranks in turn. Stages follow each other, so on several machines some neighbours, and the first and
    the last stage, are on two of them, and all stages wait for those. In a ring over m machines a message passes the
    network m - 1 times, and as often again if it is a sum that all get. A stage sends to the next one.

    A ring over several machines passes their network once for each group that has ranks on the same machines. All these
    rings together reach more of it than one of them alone. The network does not wait because an operation is slow
    inside a machine. A GPU sends while the network passes what came before; gloo, which connects CPUs, sums a piece
    when it has passed. It reduces and scatters by an all-reduce: the network passes twice what a ring would send.
    ``dsgpt.benchmarks.network`` measures it.

    Args:
        setup: the training.
        rates: of the machine.
        traffic: in a step.
        devices: of one machine.
        kind: ``cpu`` or ``cuda``.
    """
    sizes, of_stages = setup.sizes, traffic.axis == "pipeline"
    apart = {"data": sizes.tensor, "sequence": sizes.tensor, "tensor": 1}  # ranks to the next one of the group
    stride = apart.get(traffic.axis, setup.world_size // sizes.pipeline)
    ranks, machines = stride * traffic.group_size, 1
    if setup.world_size > devices and (of_stages or devices % ranks):
        machines = 2 if of_stages else min(traffic.group_size, max(2, -(-ranks // devices)))
    passes = machines - 1 if of_stages else machines * ring_factor(traffic.operation, machines)
    precision = "fp32" if traffic.summed_width == FULL else setup.precision
    bus, rings = at_ranks(rates.bus, traffic.group_size), min(stride, devices)
    # measured of operations that only move numbers in fp32 alone; a reduction to one rank sums as an all-reduce does
    slowness = rates.slowness.get("all_reduce" if traffic.operation == "reduce" else traffic.operation, {})
    sending = slowness.get(precision, slowness.get("fp32", 1.0)) * traffic.ring_bytes / bus
    beyond = rates.network * math.pow(rings, rates.rings_power) / rings
    if machines > 1 and beyond < bus:
        passing = traffic.ring_bytes / beyond
        twice = 2 if traffic.operation == "reduce_scatter" else 1
        sending = sending + passing * twice if kind == "cpu" else max(sending, passing)
    return sending + traffic.calls * (at_ranks(rates.collective_sec, traffic.group_size) + passes * rates.network_sec)


_ASSUMED_OPERATION_SEC = 4e-6
"""Seconds of each of them on the host of a GPU: as on a CPU. Nobody measured it."""
_HIDDEN, _BESIDE, _ADDED = math.inf, 1.0, 0.0
"""How much of the passes' time hides the hooks of ZeRO-3 on GPUs, which nobody measured. The GPU always has enough to
do; or the host runs ahead of it until it is the slower one; or the GPU waits for every hook."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of one optimizer step."""

    parts: dict[str, float]
    """Seconds by what they are; they add up to ``seconds``."""
    least: float
    """Seconds at the fastest rates that the machine may have."""
    most: float
    """Seconds at the slowest."""
    hidden: float
    """Seconds of communication that computation hides; not in ``parts``."""
    validation_micro_batch: float
    """Seconds to validate on one micro batch."""
    overlap: str
    """Words for the communication that overlaps."""

    @property
    def seconds(self) -> float:
        """The likely time."""
        return sum(self.parts.values())


def predict_step(setup: Setup, machine: Machine) -> StepTime:
    """The time of a step on ``machine``, whose rates must have the setup's precision."""
    likely = _slowest_stage(setup, machine.rates, machine, _BESIDE)
    host, overlap = _host_seconds(setup, machine), strategy_of(setup).overlap_in_words
    if machine.kind == "cpu":
        overlap = "nothing overlaps: on a CPU, sending needs the core that computes"
    if host:
        overlap += f"; the host needs {host:.2g} s for ZeRO-3's hooks (assumed) beside the GPU, and may delay it"
    return StepTime(
        parts=likely.parts,
        least=sum(_slowest_stage(setup, machine.fastest, machine, _HIDDEN).parts.values()),
        most=sum(_slowest_stage(setup, machine.slowest, machine, _ADDED).parts.values()),
        hidden=likely.hidden,
        validation_micro_batch=likely.validation,
        overlap=overlap,
    )


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits for the others: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def likely_sec(setup: Setup, machine: Machine) -> float:
    """The likely seconds of a step alone."""
    return sum(_slowest_stage(setup, machine.rates, machine, _BESIDE).parts.values())


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """The step of one rank."""

    parts: dict[str, float]
    hidden: float
    validation: float
    micro_batch: float
    """Seconds of one."""


def _slowest_stage(setup: Setup, rates: Rates, machine: Machine, beside: float) -> _Rank:
    alike = [(setup.blocks(rank), rank == 0, setup.computes_loss(rank)) for rank in setup.first_ranks]
    ranks = {
        kind: _rank(setup, rates, machine, rank, beside)
        for kind, rank in dict(zip(alike, setup.first_ranks, strict=True)).items()
    }
    slowest = max(ranks.values(), key=lambda rank: sum(rank.parts.values()) - rank.micro_batch)
    if len(alike) > 1:
        slowest.parts["bubble"] = sum(ranks[kind].micro_batch for kind in alike) - slowest.micro_batch
    return slowest


def _rank(setup: Setup, rates: Rates, machine: Machine, rank: int, beside: float) -> _Rank:
    """The step of ``rank``, as if it waited for no other stage of its pipeline."""
    micro_batches, strategy = setup.gradient_accumulation_steps, strategy_of(setup)
    blocks, stage, last = setup.blocks(rank), setup.stage(rank), setup.sizes.pipeline - 1
    per_tensor = strategy.operations_per_tensor * len(setup.parameters(rank))
    block, head = block_forward(setup), head_and_loss(setup, kind=machine.kind)
    # looking up and adding the two embeddings, the gradients of both, and the last LayerNorm: 16 streams
    ends = OpCounts(elementwise_bytes=16 * stream_bytes(setup), kernels=16).times(((stage == 0) + (stage == last)) / 4)
    work = {
        "forward": block.times(blocks) + ends,
        "backward": block_backward(setup).times(blocks) + ends + OpCounts(kernels=per_tensor),
        "hooks": OpCounts(kernels=strategy.hook_operations if machine.kind == "cpu" else 0),
        "recomputation": block.times(blocks if setup.activation_checkpointing else setup.selective * blocks / 2),
        "head and loss": head if stage == last else OpCounts(),
    }
    seconds = {name: each.seconds(rates, setup) for name, each in work.items()}
    forward, backward = seconds["forward"], seconds["backward"] + seconds["recomputation"]
    once = of_activations = hidden = 0.0  # activations delay the other stages of a pipeline too
    for traffic in step_traffic(setup, rank=rank):
        sending = sending_sec(setup, rates, traffic, devices=machine.devices, kind=machine.kind)
        if traffic.what == "activations":
            of_activations += sending / micro_batches
            continue
        passing = traffic.behind[0] * forward + traffic.behind[1] * backward
        # a CPU computes with the core that sends
        share = traffic.hidden * (rates.gathers_hidden if strategy.hook_operations else 1)
        behind = min(share * sending, passing) if machine.kind != "cpu" else 0.0
        hidden += behind
        once += sending - behind * (1 - rates.contention)
    parts = {name: micro_batches * each for name, each in seconds.items()}
    parts["gradients"] = strategy.gradient_bytes(rank, kind=machine.kind) / rates.memory
    if machine.kind == "cpu":
        parts["gradients"] += strategy.low_arithmetic_bytes(rank) / rates.elementwise[setup.precision]
    # the norm reads every gradient, 4 bytes per element, and clipping rewrites it, 8
    passed = FULL + (2 * FULL if setup.recipe.gradient_clipping else 0)
    parts["norm and clipping"] = strategy.stepped_elements(rank) * passed / rates.memory
    on_host = rates.host_memory if strategy.steps_on_host else rates.memory  # with offload the host steps
    parts["optimizer"] = strategy.optimizer_bytes(rank) / on_host
    # Gradients to the host, new weights back, weights of every gather, and moments and weights through files.
    moved = copied(setup, rank=rank)
    linked, filed = (sum(each.size for each in moved if each.link == link) for link in ("host", "files"))
    parts["offload"] = linked / rates.host_link + filed * min(machine.devices, setup.world_size) / rates.disk
    parts["communication"] = once + micro_batches * of_activations
    if host := _host_seconds(setup, machine):
        parts["hooks"] = max(0.0, host - beside * sum(parts[name] for name in (*seconds, "communication")))
    # a micro batch of a validation: the forward pass of all blocks, and the loss without gradients
    loss = OpCounts(matrix_flops=head.matrix_flops / 3, logits=head.logits / 2, kernels=head.kernels)
    return _Rank(
        parts={name: each for name, each in parts.items() if each},
        hidden=hidden,
        validation=(block.times(blocks) + loss).seconds(rates, setup) + of_activations / 3,
        micro_batch=sum(seconds.values()) + of_activations,
    )


def _host_seconds(setup: Setup, machine: Machine) -> float:
    """Seconds of ZeRO-3's hooks in a step, on the host of a GPU."""
    if machine.kind == "cpu":
        return 0.0
    return strategy_of(setup).hook_operations * setup.gradient_accumulation_steps * _ASSUMED_OPERATION_SEC


# Predicts the time of a whole training: its steps, validations, checkpoints and start.

START_SEC = 60.0
"""Assumed seconds until the first step: launcher, imports, process group, compiled operations."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of a training by what they are, at the likely rates; and all of them at the fastest and the slowest."""

    steps: int
    """Optimizer steps."""
    parts: dict[str, float]
    """``steps``, ``validation``, ``checkpoints``, ``start``, and what ``interruptions`` are expected to cost."""
    least: float
    most: float
    save_every: int
    """Steps between checkpoints; 0: only at the end."""
    restart: float
    """Seconds of a start from a checkpoint."""

    @property
    def seconds(self) -> float:
        """The likely time."""
        return sum(self.parts.values())

    @property
    def goodput(self) -> float:
        """The share of the likely time that goes into steps which are kept."""
        return self.parts["steps"] / self.seconds


def run_time(setup: Setup, machine: Machine, step: StepTime, options: PlanOptions) -> RunTime:
    """The time of a training.

    Args:
        setup: that is trained.
        machine: on which it is.
        step: how long its steps take.
        options: how many tokens, and how often it validates and saves, which it does at the end in any case. With
            ``mtbf`` the interval of saves is planned, not taken.
    """
    own_tokens = setup.data_parallel_size * setup.micro_batch_size * setup.seq_length
    mtbf, save_every = options.mtbf, options.save_every
    steps = max(1, math.floor((options.tokens or 0) / (own_tokens * setup.gradient_accumulation_steps)))
    validations = _times(steps, options.eval_every) if options.val_tokens else 0
    # micro batches that a rank validates on, the bubble of a pipeline included
    micro_batches = options.val_tokens / own_tokens + setup.sizes.pipeline - 1
    validation = validations * micro_batches * step.validation_micro_batch
    # weights and moments in fp32; all machines write at once, each the parts of its ranks, and rank 0 reads everything
    checkpoint = FULL * (1 + setup.moments) * total(model_parameters(setup.model))
    written = checkpoint / math.ceil(setup.world_size / machine.devices)
    if mtbf is not None:
        save_every = best_save_every(step.seconds + validation / steps, save=written / machine.rates.disk, mtbf=mtbf)
        save_every = min(save_every, steps)
    saves = _times(steps, save_every)

    def seconds_of(step_seconds: float, rates: Rates) -> dict[str, float]:
        parts = {"steps": steps * step_seconds, "validation": validation * step_seconds / step.seconds}
        parts |= {"checkpoints": saves * written / rates.disk, "start": START_SEC}
        if mtbf is not None:
            restart = START_SEC + checkpoint / rates.disk
            undisturbed = sum(parts.values()) - START_SEC
            disturbed = with_interruptions(undisturbed, segment=undisturbed / saves, restart=restart, mtbf=mtbf)
            parts["interruptions"] = disturbed - undisturbed
        return {name: seconds for name, seconds in parts.items() if seconds}

    return RunTime(
        steps=steps,
        parts=seconds_of(step.seconds, machine.rates),
        least=sum(seconds_of(step.least, machine.fastest).values()),
        most=sum(seconds_of(step.most, machine.slowest).values()),
        save_every=save_every,
        restart=START_SEC + checkpoint / machine.rates.disk,
    )


def best_save_every(step: float, *, save: float, mtbf: float) -> int:
    """Steps between checkpoints that lose least, from Daly's estimate, which refines Young's ``sqrt(2 save mtbf)``.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.

    Args:
        step: seconds of a step, with its share of the validations.
        save: seconds that a save takes of the training.
        mtbf: mean seconds between interruptions.
    """
    share = math.sqrt(save / (2 * mtbf))
    seconds = mtbf if share >= 1 else math.sqrt(2 * save * mtbf) * (1 + share / 3 + share**2 / 9) - save
    return max(1, round(seconds / step))


_MOST_EXPONENT = 100.0
"""Largest exponent of the expected time: beyond it a training never ends, and the result is no number."""


def with_interruptions(seconds: float, *, segment: float, restart: float, mtbf: float) -> float:
    """Expected seconds of a training if it is interrupted at random, also while it restarts.

    Each interruption loses the work since the last checkpoint. Source: Daly, as above.

    Args:
        seconds: without interruptions, saves included.
        segment: of these, from the end of a save to the end of the next one.
        restart: from an interruption to the first step after it.
        mtbf: mean seconds between interruptions.
    """
    grown = math.exp(min(restart / mtbf, _MOST_EXPONENT)) * math.expm1(min(segment / mtbf, _MOST_EXPONENT))
    return mtbf * grown * seconds / segment


def _times(steps: int, every: int) -> int:
    """Number of times that something happens every ``every`` steps, and after the last one in any case."""
    return math.ceil(steps / every) if every else 1


# Fits the rates of a machine to measured steps: a factor of computation for each precision, one of communication. A
# roofline from rates that were measured one by one leaves out what happens between them: allocation, caches, Python.
# The factors say how much longer a step takes. They are few, so that they hold for setups that were never measured.

_LEAST_SHARE = 0.05
"""Least share of a step: a measured step says nothing about parts that take less."""
_BOUNDS = (0.2, 5.0)
"""Bounds of factors: beyond them the machine is not the one that was calibrated."""
_LEAST_SPREAD = 0.05
_ROUNDS = 30
_FARTHEST = 0.5
"""Change of a factor's logarithm in a round."""
_SENT = "communication"


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A setup whose step was measured, and the machine as it is with that many devices at work."""

    setup: Setup
    machine: Machine
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Measured time divided by the time that the machine's rates predict."""

    compute: Mapping[str, float]
    """Factors by precision."""
    communication: float
    spread: float
    """The largest share by which a measured step is missed by the factors of all others: what to expect of a setup that
    was not measured."""
    steps: int
    """Measured ones that were fitted."""

    def applied(self, machine: Machine) -> Machine:
        """``machine`` with these factors; its range becomes the spread of the fit."""
        rates = _slowed(machine.rates, {**self.compute, _SENT: self.communication})
        wide = 1 + max(_LEAST_SPREAD, self.spread)
        return replace(
            machine,
            rates=rates,
            slowest=rates.scaled(compute=wide, communication=wide),
            fastest=rates.scaled(compute=1 / wide, communication=1 / wide),
            assumed=False,
            basis=(
                f"{machine.basis.partition(';')[0]}; fitted to measured steps ({self.steps}) in "
                f"{' and '.join(sorted(self.compute))}, each of which a fit to the others misses by {self.spread:.0%} "
                "at most"
            ),
        )


def _slowed(rates: Rates, factors: Mapping[str, float]) -> Rates:
    """Rates that make computation in each precision, and communication, slower by these factors."""
    for precision in factors.keys() - {_SENT}:
        rates = rates.in_precision(precision, slower=factors[precision])
    return rates.scaled(compute=1, communication=factors[_SENT])


def fit(steps: Sequence[MeasuredStep]) -> Factors:
    """The factors with which predictions are nearest to ``steps``, of which there is at least one.

    A prediction is a sum of terms that grow with one factor each. Gauss-Newton steps on the logarithms of the factors
    minimize the sum of squares of log(predicted / measured).
    """
    names = [*sorted({step.setup.precision for step in steps}), _SENT]
    measured = [(step.seconds, _terms(step, names)) for step in steps]
    spread = 0.0
    for index, (seconds, terms) in enumerate(measured):
        others = _nearest(names, measured[:index] + measured[index + 1 :])
        spread = max(spread, abs(_sum(terms, others) / seconds - 1))
    factors = _nearest(names, measured)
    sent = factors.pop(_SENT)
    return Factors(compute=factors, communication=sent, spread=spread, steps=len(steps))


def _nearest(names: Sequence[str], steps: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """The factors that fit ``steps``, each as seconds and terms; 1 for what takes no step long enough."""
    factors = dict.fromkeys(names, 1.0)
    free = [name for name in names if any(terms[name] >= _LEAST_SHARE * seconds for seconds, terms in steps)]
    if not free:
        return factors
    import numpy as np  # noqa: PLC0415 - only fits need it

    for _ in range(_ROUNDS):
        predicted = np.array([_sum(terms, factors) for _, terms in steps])
        off = np.log(predicted / np.array([seconds for seconds, _ in steps]))
        slopes = np.array([[terms[name] * factors[name] for name in free] for _, terms in steps]) / predicted[:, None]
        change, *_ = np.linalg.lstsq(slopes, -off, rcond=None)
        for name, by in zip(free, np.clip(change, -_FARTHEST, _FARTHEST).tolist(), strict=True):
            factors[name] = min(_BOUNDS[1], max(_BOUNDS[0], factors[name] * math.exp(by)))
    return factors


def _terms(step: MeasuredStep, names: Sequence[str]) -> dict[str, float]:
    """The seconds of ``step`` that grow with each factor; under the empty name those that grow with none."""
    ones = dict.fromkeys(names, 1.0)
    once, *twice = (
        predict_step(step.setup, replace(step.machine, rates=_slowed(step.machine.rates, factors))).seconds
        for factors in (ones, *(ones | {name: 2.0} for name in names))
    )
    terms = {name: seconds - once for name, seconds in zip(names, twice, strict=True)}
    return terms | {"": once - sum(terms.values())}


def _sum(terms: Mapping[str, float], factors: Mapping[str, float]) -> float:
    return sum(factors.get(name, 1.0) * seconds for name, seconds in terms.items())
