"""See runs, plan them and try the models, in a browser: ``python charts/dashboard.py --help``."""

from dsgpt.common.script import run_script
from dsgpt.dashboard.command import is_served, main

if __name__ == "__main__" and not is_served():
    run_script(main)
elif is_served():
    from dsgpt.dashboard.app import show

    show()
