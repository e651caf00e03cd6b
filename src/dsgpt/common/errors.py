"""Errors that scripts turn into an exit code, and the exit codes (the table is in docs/exit-codes.md)."""

EXIT_DONE = 0
EXIT_DOES_NOT_FIT = 1
"""``src/plan.py``: the setup that was asked for needs more memory than there is."""
EXIT_USER_ERROR = 2
EXIT_NON_FINITE = 3
EXIT_NOT_SAVED = 4
EXIT_OUT_OF_MEMORY = 5
EXIT_STOPPED = 75
"""The run was asked to stop, and saved a checkpoint first: ``--resume`` continues it and loses no step. The number is
``EX_TEMPFAIL`` of sysexits.h: a scheduler may repeat the command."""
EXIT_INTERRUPTED = 130
"""The process ended at once: the steps since the last checkpoint are lost."""
EXIT_READER_GONE = 141
"""The reader of the output closed it. The number is what a shell reports for a program that SIGPIPE ended."""


class UserError(ValueError):
    """A mistake that the user can correct; printed without a traceback, exit code 2.

    ``problems`` holds one line for each mistake: the file, value or flag at fault, what is allowed, and what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DifferentRunError(UserError):
    """The run in the folder is sound, but was made with other settings or data. Nothing else is wrong."""


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm became NaN or infinite; that step was not saved, exit code 3."""

    exit_code = EXIT_NON_FINITE


class SaveError(RuntimeError):
    """A checkpoint could not be written, and every rank knows it; exit code 4."""

    exit_code = EXIT_NOT_SAVED


class OutOfMemory(RuntimeError):
    """The memory of a device ran out; the message says what fits. Exit code 5."""

    exit_code = EXIT_OUT_OF_MEMORY


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, by a signal or because its launcher ended; exit code 75.

    It is a ``KeyboardInterrupt`` because libraries do not catch those. ``together``: all ranks agreed to stop.
    ``limit``: because of ``--max_hours`` or ``--max_cost``.
    """

    def __init__(self, message: str, *, together: bool = False, limit: bool = False) -> None:
        super().__init__(message)
        self.together, self.limit = together, limit
