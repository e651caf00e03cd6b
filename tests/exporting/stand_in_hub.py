"""Stands for the Hugging Face hub, which tests must not need: the few answers that fetching single files takes."""

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(models: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve folders under the names of models; the address, and the requests so far, come back."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            asked.append(f"{self.command} {self.path}")
            match = re.fullmatch(r"/(.+)/resolve/(main|[0-9a-f]{40})/(.+)", self.path)
            if match is None:
                self._end(200)
            elif match[1] not in models:
                self._end(404, {"X-Error-Code": "RepoNotFound"})
            elif not (models[match[1]] / match[3]).is_file():
                self._end(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                data = (models[match[1]] / match[3]).read_bytes()
                etag = f'"{hashlib.sha256(data).hexdigest()}"'
                headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}
                self._end(200, headers, data if body else b"")

        def _end(self, code: int, headers: dict[str, str] | None = None, data: bytes = b"") -> None:
            self.send_response(code)
            for name, value in ({"Content-Length": "0"} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
