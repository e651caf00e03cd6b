"""Serves a model over HTTP, with the interface of OpenAI's completions."""
