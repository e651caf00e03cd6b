"""What Streamlit's theme cannot say: room, and colours of text with enough contrast. Imports no Streamlit."""

from dsgpt.reports.themes import DARK, LIGHT

QUIET = f"light-dark({LIGHT.quiet}, {DARK.quiet})"
INK = f"light-dark({LIGHT.ink}, {DARK.ink})"
ON_PRIMARY = f"light-dark({LIGHT.background}, {DARK.background})"

STYLE = f"""<style>
[data-testid=stMainBlockContainer] {{padding-top: 2.75rem; padding-bottom: 3rem}}
@media (min-width: 700px) {{[data-testid=stMainBlockContainer] {{padding-left: 2.5rem; padding-right: 2.5rem}}}}
.stApp [data-testid=stCaptionContainer] {{color: {QUIET}; opacity: 1}}
.stApp [data-testid=stButtonGroup] [data-selected=true] p {{color: {INK}}}
.stApp [data-testid=stMultiSelect] [data-tag-index] *, .stApp button[kind^=primary]:enabled * {{color: {ON_PRIMARY}}}
</style>"""
"""Streamlit leaves a fifth of the screen empty around a page.

Its captions, its chosen segments, and in the dark theme its tags and primary buttons have a contrast below 4.5, the
least that WCAG 2.1 allows (success criterion 1.4.3).
"""
