"""A server under several times the requests that it can answer."""
