"""The packages of the experiment trackers that ``--track`` may name."""

from importlib.util import find_spec

from dsgpt.common.problems import Problems
from dsgpt.config.options import Options

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
    "csv": (),
}
"""What each tracker imports. The extra of ``pyproject.toml`` with the tracker's name installs it."""


def check_trackers(options: Options, problems: Problems) -> None:
    """Refuse trackers whose packages are not installed; imports none of them."""
    for name in dict.fromkeys(options.track):
        if missing := [package for package in PACKAGES[name] if not _is_installed(package)]:
            problems.add(
                f"--track {name}: needs {' and '.join(missing)}, not installed here: in the root of the repository, "
                f'run .venv/bin/python -m pip install -e ".[{name}]", or leave {name} out of --track'
            )


def _is_installed(package: str) -> bool:
    """Whether ``package`` can be imported; a folder without ``__init__.py``, such as wandb's own output, is none."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
