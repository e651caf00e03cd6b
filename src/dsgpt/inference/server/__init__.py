"""A server of completions over HTTP."""
