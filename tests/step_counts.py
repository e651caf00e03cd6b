"""Counts what a computation does, instead of how long it takes, which depends on the machine."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Counts(TorchDispatchMode):
    """A context that counts the operations inside it, of the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = FlopCounterMode(display=False)
        self.calls: Counter[str] = Counter()
        """Calls of each operation, by its name without overload, such as ``mm``."""
        self._new: Counter[int] = Counter()

    def __enter__(self) -> "Counts":
        self._flops.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._flops.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {_storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        found = function(*args, **kwargs)
        self.calls[function.overloadpacket.__name__] += 1
        for value in tree_leaves(found):
            if isinstance(value, Tensor) and _storage(value) not in before:
                self._new[value.numel()] += 1
        return found

    @property
    def flops(self) -> int:
        """Of matrix products and attention, as torch's counter knows them."""
        return self._flops.get_total_flops()

    def flops_of(self, *operations: str) -> int:
        """Of these operations of ``aten``."""
        by_operation = self._flops.get_flop_counts()["Global"]
        return sum(count for operation, count in by_operation.items() if operation.__name__.split(".")[0] in operations)

    @property
    def largest_new(self) -> int:
        """Elements of the largest tensor that an operation allocated."""
        return max(self._new)

    def new_of(self, elements: int) -> int:
        """How many tensors of this many elements were allocated."""
        return self._new[elements]


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
