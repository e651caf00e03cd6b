"""Refusals of the package, as a page shows them. Imports no Streamlit."""

from dsgpt.common.errors import UserError
from dsgpt.dashboard.command import REPOSITORY
from dsgpt.dashboard.formats import plain


def refusal(error: UserError) -> str:
    """Every mistake, a paragraph each, in Markdown; shipped files are named as they are in the repository."""
    return "\n\n".join(plain(line.replace(f"{REPOSITORY}/", "")) for line in error.problems)
