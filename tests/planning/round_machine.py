"""A machine whose rates are round numbers, so that a test can work out times by hand."""

from dataclasses import replace

from dsgpt.planner.rates import Machine, Rates

RATES = Rates(
    matrix={"fp32": {1: {1: 1e9}}, "bf16": {1: {1: 4e9}}},
    attention={"fp32": {1: {1: 1e8}}, "bf16": {1: {1: 1e8}}},
    elementwise={"fp32": 1e7, "bf16": 1e7},
    logits={"fp32": 1e6, "bf16": 1e6},
    memory=1e12,
    kernel_sec=0.0,
    bus={1: 1e6},
    collective_sec={1: 0.0},
    network=1e5,
    host_link=1e4,
    host_memory=1e3,
    disk=1e6,
)


def machine(kind: str = "cpu", *, devices: int = 8, **changes: object) -> Machine:
    """The machine, with other rates where ``changes`` names them."""
    rates = replace(RATES, **changes)
    return Machine(
        name="round",
        kind=kind,
        devices=devices,
        memory_bytes=10**9,
        host_bytes=10**9,
        precisions=("fp32", "bf16"),
        rates=rates,
        slowest=rates.scaled(compute=2, communication=2),
        fastest=rates.scaled(compute=0.5, communication=0.5),
        assumed=False,
        basis="round numbers",
    )
