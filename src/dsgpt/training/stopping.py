"""All ranks stop after the same step, although a request to stop may have reached only some of them."""

from dsgpt.common.errors import Interrupted, UserError
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.process_group import HostGroup, gather_objects
from dsgpt.training.budget import Budget


class Stopping:
    """The ranks' common decision whether to stop.

    Args:
        interruption: the requests to this rank.
        budget: its limits are requests, too.
        ranks: all ranks; each call of ``agreed`` exchanges one integer between them.
    """

    def __init__(self, interruption: Interruption, budget: Budget, ranks: HostGroup) -> None:
        self._interruption, self._budget = interruption, budget
        self._ranks = ranks
        self._limit: str | None = None

    def agreed(self, *, steps_left: bool = True) -> bool:
        """Whether any rank was asked to stop; collective, with the same answer on every rank.

        The loop calls it after every step and every batch of a validation.

        Args:
            steps_left: if not, no limit stops the run: it would only have to be started again to end.
        """
        self._budget.progress()
        if steps_left:
            self._limit = self._limit or self._budget.reached()
        return bool(self._ranks.largest(int((self._interruption.reason or self._limit) is not None)))

    def stop(self, where: str, *, idle: bool = False) -> Interrupted:
        """The exception that every rank must raise; collective.

        Args:
            where: says in the message where the run stopped.
            idle: this process took no step. A repeated call would not take one either.

        Raises:
            UserError: ``idle``, because of a limit.
        """
        reasons: list[tuple[str | None, str | None]] = gather_objects((self._interruption.reason, self._limit))
        signal, limit = (next(filter(None, each), None) for each in zip(*reasons, strict=True))
        if idle and limit and not signal:
            raise UserError(f"{limit} leaves no time for a step and its save: raise it")
        reason = signal or limit or "a request"
        return Interrupted(f"stopped by {reason} {where}", together=True, limit=reason == limit)
