"""The dependencies that pyproject.toml names are those that the code imports, and each is pinned."""

import re
import sys
import tomllib
from typing import Any

from small_run import REPOSITORY
from test_architecture import imported

from dsgpt.config.options import PACKAGES, TRACKERS

NAMES = {"pynvml": "nvidia-ml-py", "prometheus_client": "prometheus-client", "yaml": "pyyaml"}
"""Packages that are installed under another name than they are imported."""
OPTIONAL = {
    "eval": {"lm_eval"},
    "dashboard": {"streamlit"},
    "fast": {"gigatoken", "awkward"},
    "near": {"datasketch"},
    "engines": {"tiktoken"},
    "oracles": {"accelerate"},  # transformers imports it
    "serve": {"starlette", "uvicorn", "prometheus-client", "httpx2", "h11"},
}
"""The extras of features, and the packages that only the feature needs; the tests run with exact versions."""
ELSEWHERE = {"vllm"}
"""Packages that are imported only in an environment of their own, which a goal of the Makefile makes."""


def imported_packages() -> set[str]:
    """Packages from outside that any file imports, at its top or inside a function."""
    files = [path for folder in ("src", "charts", "data_prep") for path in (REPOSITORY / folder).rglob("*.py")]
    found = {name.split(".")[0] for path in files for name in imported(path)}
    return {NAMES.get(name, name) for name in found} - sys.stdlib_module_names - {"dsgpt"}


def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_imported_packages_are_dependencies_with_exact_versions():
    requirements = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8")
    optional = ELSEWHERE.union(*OPTIONAL.values())
    always = imported_packages() - optional - {package for packages in PACKAGES.values() for package in packages}
    assert always == set(project()["dependencies"])
    assert always <= set(re.findall(r"^([\w-]+)==[\d.]+$", requirements, flags=re.MULTILINE))


def test_the_makefile_installs_what_has_an_environment_of_its_own_in_an_exact_version():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for package in ELSEWHERE:
        assert re.search(rf"pip install .* {package}==[\d.]+", makefile)


def test_the_extra_of_a_tracker_has_its_packages_and_the_tests_run_with_each():
    """``mlflow-skinny`` is the package ``mlflow`` without its server and models."""
    extras = {
        name: {re.split(r"[=>]=", each)[0].removesuffix("-skinny") for each in needed if "=" in each}
        for name, needed in project()["optional-dependencies"].items()
    }
    assert PACKAGES.keys() == set(TRACKERS)
    for tracker, packages in PACKAGES.items():
        assert extras.get(tracker, set()) == set(packages)
        assert extras["test"] >= set(packages)


def test_the_package_of_a_feature_has_an_extra_and_the_tests_run_with_it():
    extras = project()["optional-dependencies"]
    for extra, packages in OPTIONAL.items():
        assert {re.split(r"[\[>=]", each)[0] for each in extras[extra]} == packages
        for package in packages:
            assert [each for each in extras["test"] if re.fullmatch(rf"{package}(\[\w+\])?==[\d.]+", each)]
