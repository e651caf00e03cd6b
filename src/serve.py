"""Serve a model with OpenAI's completions: ``.venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1``."""

from dsgpt.common.command_line import read_options, require_flags, run_script
from dsgpt.inference.server.options import API_KEY, ServeOptions, check_packages

DESCRIPTION = """\
Answer requests for completions over HTTP, as OpenAI's interface does: /v1/completions, /v1/models, /health, and
/metrics for Prometheus. Nothing that a request says is logged."""
EXAMPLES = f"""\
examples:
  .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{{"model": "demo-zero1", "prompt": "def main(", "max_tokens": 32}}'
  {API_KEY}=$(openssl rand -hex 32) .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1 --host 0.0.0.0"""


def main() -> int:
    """Read the flags, and serve until a signal."""
    options, problems = read_options(ServeOptions, description=DESCRIPTION, epilog=EXAMPLES)
    require_flags(options, problems)
    check_packages(problems)
    problems.raise_if_any()
    from dsgpt.inference.server.server import serve  # noqa: PLC0415 - torch takes seconds; --help should not

    return serve(options)


if __name__ == "__main__":
    run_script(main)
