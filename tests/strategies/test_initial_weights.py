"""Initial weights follow from seed and name alone on every rank; no rank ever holds the whole of a split model."""

import pytest
import torch
from small_run import command_line, write_inputs
from strategy_cells import DEEP, LAYERS, NO_LIBAIO, NVME, START_BF16, START_FP32, THREE_D, Asked
from torch.utils._python_dispatch import TorchDispatchMode

from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import resolve
from dsgpt.machine.topology import read_topology
from dsgpt.strategies.deepspeed.zero import _build_whole

BUILT_IN_PARTS = [
    *((Asked(2, f"start {name} {LAYERS[-1]}"), 2) for name in DEEP),
    (Asked(2, "steps zero3"), 2),
    (Asked(2, "steps pipeline2-zero1"), 2),
    (Asked(4, "steps pipeline2-zero1"), 2),
    (Asked(8, f"steps {THREE_D}"), 4),
]
CASES = [
    *(Asked(2, f"start {name} fp32") for name in START_FP32),
    *(Asked(2, f"start {name} bf16") for name in START_BF16),
    *(Asked(ranks, f"steps {name}") for ranks in (2, 4) for name in ("tensor2-zero1", "sequence2-zero1")),
    *(cell for cell, _ in BUILT_IN_PARTS),
]


@pytest.mark.skipif(NO_LIBAIO, reason="needs libaio-dev")
def test_offload_to_nvme_is_tested_here():
    assert NVME


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_every_rank_starts_from_the_baselines_weights_bit_for_bit(seen, cell):
    """In bf16 this holds for the masters too: they start as the rounded weights, as in the baseline."""
    for facts in seen(cell).ranks:
        assert facts["missing"] == []
        assert facts["wrong"] == []


@pytest.mark.parametrize(("cell", "parts"), BUILT_IN_PARTS, ids=str)
def test_no_rank_ever_holds_the_whole_model_while_it_is_built(seen, cell, parts):
    """A rank holds at most its part and three copies of one parameter, for example drawn, rounded and split."""
    for facts in seen(cell).ranks:
        whole, largest = facts["whole"], facts["largest"]
        shared = largest if "pipeline" in cell.name else 0  # both ends of a pipeline hold the embedding
        buffers = 5 * largest / parts if "nvme" in cell.name else 0  # to swap through
        assert whole / (2 * parts) < facts["most_while_built"] - buffers <= whole / parts + shared + 3 * largest < whole


@pytest.mark.parametrize(("cell", "parts"), [case for case in BUILT_IN_PARTS if "steps" in case[0].name], ids=str)
def test_a_rank_trains_only_its_part(seen, cell, parts):
    """Between steps it keeps its stage or shard, and biases and LayerNorms, which are too small to split."""
    for facts in seen(cell).ranks:
        shared = facts["largest"] if "pipeline" in cell.name else 0
        assert facts["whole"] / parts <= facts["held"] <= 1.1 * facts["whole"] / parts + shared


class OnMeta(TorchDispatchMode):
    """Notes the precision of every weight that is made on the device ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "meta":
            self.seen.add(made.dtype)
        return made


def test_no_fp32_copy_of_the_model_is_made_on_the_device(tmp_path):
    """``meta`` stands for a GPU. An fp32 copy there would be twice what ZeRO with offload needs of it later."""
    options, problems = parse_arguments(command_line(write_inputs(tmp_path), precision="bf16"))
    config = resolve(options, topology=read_topology(), problems=problems)
    with OnMeta() as made:
        _build_whole(config, torch.device("meta"))
    assert made.seen == {torch.bfloat16}
