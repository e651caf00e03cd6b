"""What ``/metrics`` tells Prometheus. No figure has a text of a request in it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "dsgpt_requests",
            "Requests for completions that ended, by status; 499: the client hung up",
            ["status"],
            registry=self.registry,
        )
        self.of_keys = Counter(
            "dsgpt_key_requests",
            "Requests for completions by the name of their key",
            ["key", "status"],
            registry=self.registry,
        )
        self.tokens = Counter("dsgpt_tokens", "Tokens read and written", ["kind"], registry=self.registry)
        self.open = Gauge("dsgpt_open_sequences", "Sequences that are decoded or wait", registry=self.registry)
        self.seconds = self._histogram("dsgpt_request_seconds", "From a request to the end of its answer")
        self.first_token = self._histogram("dsgpt_first_token_seconds", "From a request to its first token")
        self.queue = self._histogram("dsgpt_queue_seconds", "How long a sequence waited for its first forward pass")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=SECONDS, registry=self.registry)
