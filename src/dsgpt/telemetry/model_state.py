"""Bytes of model state that a rank holds, by device: what ``planning.model_state`` predicts.

Storages are counted, so views add nothing.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

StateBytes = dict[str, dict[str, int]]
"""Bytes by category and device type, for example ``{"optimizer": {"cpu": 4096}}``."""


def state_bytes(categories: Mapping[str, Iterable[Tensor]]) -> StateBytes:
    """Bytes of the storages under the tensors of each category.

    A storage counts whole and once, in the first category that has a tensor in it: views of a flat buffer, or gradients
    in a bucket, count as the buffer. A category without bytes has an empty dictionary.
    """
    seen: set[tuple[str, int]] = set()
    totals: StateBytes = {}
    for category, tensors in categories.items():
        by_device = totals.setdefault(category, {})
        for tensor in tensors:
            storage, kind = tensor.untyped_storage(), tensor.device.type
            place = (str(tensor.device), storage.data_ptr())
            if storage.nbytes() and place not in seen:
                seen.add(place)
                by_device[kind] = by_device.get(kind, 0) + storage.nbytes()
    return totals
