"""All ranks stop after the same step, although a request to stop may have reached only some of them."""

from dsgpt.common.errors import Interrupted
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.process_group import HostGroup, gather_objects


class Stopping:
    """The ranks' common decision whether to stop.

    Args:
        interruption: the requests to this rank.
        ranks: all ranks; each call of ``agreed`` exchanges one integer between them.
    """

    def __init__(self, interruption: Interruption, ranks: HostGroup) -> None:
        self._interruption = interruption
        self._ranks = ranks

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; collective, with the same answer on every rank."""
        return bool(self._ranks.largest(int(self._interruption.reason is not None)))

    def reason(self) -> str:
        """The request to stop that the lowest rank with a request received; collective."""
        reasons: list[str | None] = gather_objects(self._interruption.reason)
        return next(filter(None, reasons), "a request")

    def stop(self, where: str) -> Interrupted:
        """The exception that every rank must raise; collective.

        Args:
            where: says in the message where the run stopped.
        """
        return Interrupted(f"stopped by {self.reason()} {where}", together=True)
