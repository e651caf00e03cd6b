"""The plan of one setup: its memory, the time of a step and of the training, and what that costs."""

from dataclasses import dataclass, replace
from functools import cached_property

from dsgpt.advising.options import PlanOptions
from dsgpt.advising.request import PlanRequest
from dsgpt.common.divisors import divisors
from dsgpt.planning.hardware import gpus
from dsgpt.planning.model_state import model_state
from dsgpt.planning.peak_memory import Peak, peak_memory, worst_peak
from dsgpt.planning.prices import Cost, PriceTable, costs, own_cost
from dsgpt.planning.rates import Machine
from dsgpt.planning.run_time import Length, RunTime, run_time
from dsgpt.planning.setup import Setup
from dsgpt.planning.step_time import StepTime, predict_step

GPU_SHARE, GPU_CONTEXT_BYTES = 0.94, 600_000_000
"""Of a GPU's memory, tensors can fill this share, after the driver's and NCCL's part: an allocator leaves gaps."""
CPU_SHARE, CPU_PROCESS_BYTES = 0.9, 700_000_000
"""The same of a CPU device's share of its machine's memory, after the process without tensors."""
HOST_SHARE = 0.8
"""Of a host's memory, offload can fill this share, beside processes, data and the cache of its files."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is predicted of one setup."""

    request: PlanRequest
    setup: Setup
    prices: PriceTable
    rank: int
    """The rank that needs most memory."""
    peak: Peak
    usable_bytes: int
    """Of a device, for tensors."""
    host_bytes: int
    """Of model state that a rank keeps in the memory of its host."""

    @property
    def machine(self) -> Machine:
        """That it is planned for."""
        return self.request.machine

    @cached_property
    def step(self) -> StepTime:
        """Computed when it is asked for: a search needs it only of setups that fit."""
        return predict_step(self.setup, self.machine)

    @cached_property
    def run(self) -> RunTime:
        """The whole training."""
        return run_time(self.setup, self.machine, self.step, length_of(self.request.options))

    @cached_property
    def costs(self) -> list[Cost]:
        """The cheapest first; empty if no price is known."""
        return _costs(self.setup, self.machine, self.request.options, self.prices, self.run)

    @property
    def fits(self) -> bool:
        """Whether the rank that needs most has the memory, and its host too."""
        if self.machine.kind == "cpu":
            return self.peak.total + self.host_bytes <= self.usable_bytes
        return self.peak.total <= self.usable_bytes and self.host_bytes <= HOST_SHARE * self.machine.host_bytes

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        setup = self.setup
        sequences = setup.micro_batch_size * setup.gradient_accumulation_steps * setup.data_parallel_size
        return sequences * setup.seq_length

    def tokens_per_sec(self, seconds: float) -> float:
        """Over all ranks, if a step takes ``seconds``."""
        return self.tokens_per_step / seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation at the likely time; None without a datasheet's peak."""
        gpu = gpus().get(self.machine.name)
        peak = gpu.peak(self.setup.precision) if gpu else None
        if peak is None:
            return None
        flops = self.setup.model.flops_per_token(self.setup.seq_length)
        return self.tokens_per_sec(self.step.seconds) / self.setup.world_size * flops / peak


def usable_bytes(machine: Machine) -> int:
    """Bytes of a device that tensors can fill."""
    if machine.kind == "cpu":
        return max(0, int(CPU_SHARE * machine.memory_bytes) - CPU_PROCESS_BYTES)
    return int(GPU_SHARE * machine.memory_bytes) - GPU_CONTEXT_BYTES


def fullest_rank(setup: Setup, kind: str) -> tuple[int, Peak]:
    """The rank that needs the most memory of its device, and its peak.

    Only ZeRO 1 and 2 in fp32 deal parameters unevenly to the ranks of a pipeline stage.
    """
    if setup.run_type == "optimized" and setup.recipe.zero_stage in {1, 2} and setup.precision == "fp32":
        return worst_peak(setup, device=kind)
    peaks = [(rank, peak_memory(setup, rank=rank, device=kind)) for rank in setup.first_ranks]
    return max(peaks, key=lambda each: each[1].total)


def length_of(options: PlanOptions) -> Length:
    """The length of the training that the flags name."""
    return Length(
        tokens=options.tokens or 0.0,
        eval_every=options.eval_every,
        val_tokens=options.val_tokens,
        save_every=options.save_every,
    )


def plan_of(setup: Setup, request: PlanRequest, prices: PriceTable) -> Plan:
    """The plan of ``setup``."""
    rank, peak = fullest_rank(setup, request.machine.kind)
    return Plan(
        request=request,
        setup=setup,
        prices=prices,
        rank=rank,
        peak=peak,
        usable_bytes=usable_bytes(request.machine),
        host_bytes=_host_bytes(setup, rank),
    )


def what_would_fit(plan: Plan) -> list[str]:
    """A line for a setup that does not fit: the largest micro batch that would, with as little change as possible."""
    if plan.fits:
        return []
    share = plan.setup.micro_batch_size * plan.setup.gradient_accumulation_steps
    for checkpointing in sorted({plan.setup.activation_checkpointing, True}):
        for micro in sorted(divisors(share), reverse=True):
            setup = replace(
                plan.setup,
                micro_batch_size=micro,
                gradient_accumulation_steps=share // micro,
                activation_checkpointing=checkpointing,
            )
            if plan_of(setup, plan.request, plan.prices).fits:
                flag = "--activation_checkpointing and " if checkpointing > plan.setup.activation_checkpointing else ""
                return ["", f"it fits with {flag}--micro_batch_size_per_gpu {micro}"]
    return ["", "it fits with no micro batch: take --recommend, which also tries other strategies, or other GPUs"]


def _host_bytes(setup: Setup, rank: int) -> int:
    """What is off the device and not swapped to files."""
    state, recipe = model_state(setup, rank=rank), setup.recipe
    files = {"optimizer", "master"} if recipe.offload_optimizer == "nvme" else set()
    files |= {"parameters"} if recipe.offload_param == "nvme" else set()
    return sum(getattr(state, name) for name in set(state.off_device) - files)


def _costs(setup: Setup, machine: Machine, options: PlanOptions, prices: PriceTable, run: RunTime) -> list[Cost]:
    if options.price_per_gpu_hour is not None:
        times = {"seconds": run.seconds, "least": run.least, "most": run.most}
        return [own_cost(options.price_per_gpu_hour, gpus=setup.world_size, **times)]
    return costs(
        prices,
        gpu=machine.name,
        gpus=setup.world_size,
        together=min(setup.world_size, machine.devices),
        spot=options.spot,
        seconds=run.seconds,
        least=run.least,
        most=run.most,
    )
