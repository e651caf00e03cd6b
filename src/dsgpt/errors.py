"""What can go wrong for a user, and the exit code that says so (the table is in README.md)."""

EXIT_DONE = 0
EXIT_USER_ERROR = 2
EXIT_NON_FINITE = 3
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """A mistake that the user can mend; shown without a traceback, exit code 2.

    ``problems`` holds one line each: the file, value or flag at fault, what is allowed, and what to do.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm became NaN or infinite; nothing of it was saved, exit code 3."""
