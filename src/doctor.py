"""Is this machine, or this cluster, fit for a training? ``.venv/bin/python src/doctor.py --help``."""

from dsgpt.common.command_line import run_script
from dsgpt.training.doctor import main

if __name__ == "__main__":
    run_script(main)
