"""Adds the scripts and the recipes to a wheel, in the places that they have in a checkout; see ``dsgpt.__main__``."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = (
    "src/*.py",
    "data_prep/*.py",
    "charts/*.py",
    "charts/.streamlit/*",
    "ds_configs/**/*.json",
    "ds_configs/*.md",
    "launch/**/*",
)


class BuildWithScripts(build_py):
    """Builds the package, and copies what ``CARRIED`` names into ``dsgpt/checkout``."""

    def run(self) -> None:
        """Build; an editable installation uses the checkout itself."""
        super().run()
        if self.editable_mode:
            return
        root = Path(__file__).resolve().parent
        for path in sorted(path for pattern in CARRIED for path in root.glob(pattern) if path.is_file()):
            target = Path(self.build_lib, "dsgpt", "checkout", path.relative_to(root))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)  # with its mode: some are started by name


setup(cmdclass={"build_py": BuildWithScripts})
