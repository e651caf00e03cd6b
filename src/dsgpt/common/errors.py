"""What can go wrong for a user, and the exit code that says so (the table is in docs/exit-codes.md)."""

EXIT_DONE = 0
EXIT_USER_ERROR = 2
EXIT_NON_FINITE = 3
EXIT_NOT_SAVED = 4
EXIT_STOPPED = 75
"""Asked to stop and stopped in order: nothing is lost, ``--resume`` goes on. What sysexits.h calls a temporary
failure, after which the same request may be repeated."""
EXIT_INTERRUPTED = 130
"""Ended at once: what was done since the last checkpoint is lost."""
EXIT_READER_GONE = 141
"""The reader of the output had enough. What a shell says of a program that SIGPIPE ended."""


class UserError(ValueError):
    """A mistake that the user can mend; shown without a traceback, exit code 2.

    ``problems`` holds one line each: the file, value or flag at fault, what is allowed, and what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DifferentRunError(UserError):
    """All that is wrong: the run in the folder is sound, and was made with other settings or data than this one."""


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm became NaN or infinite; nothing of it was saved, exit code 3."""

    exit_code = EXIT_NON_FINITE


class SaveError(RuntimeError):
    """A checkpoint could not be written, which all ranks know; exit code 4."""

    exit_code = EXIT_NOT_SAVED


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, by a signal or by the end of its launcher; exit code 75.

    A ``KeyboardInterrupt``, because libraries know not to catch one. ``together`` where all ranks agreed to it.
    """

    def __init__(self, message: str, *, together: bool = False) -> None:
        super().__init__(message)
        self.together = together
