"""Where a run ends that was asked to stop early: all ranks after the same step."""

from dsgpt.common.errors import Interrupted
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.process_group import HostGroup, gather_objects


class Stopping:
    """The ranks' common answer to requests that may have reached only one of them.

    Args:
        interruption: the requests to this rank.
        ranks: all of them; one whole number crosses between them at every question.
    """

    def __init__(self, interruption: Interruption, ranks: HostGroup) -> None:
        self._interruption = interruption
        self._ranks = ranks

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; collective, and the same answer everywhere."""
        return bool(self._ranks.largest(int(self._interruption.reason is not None)))

    def reason(self) -> str:
        """What the first rank that was asked was asked by; collective."""
        return next(filter(None, gather_objects(self._interruption.reason)), "a request")

    def stop(self, where: str) -> Interrupted:
        """To be raised on every rank; collective.

        Args:
            where: the run stands, for the message.
        """
        return Interrupted(f"stopped by {self.reason()} {where}", together=True)
