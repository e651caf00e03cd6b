"""``make demo``: prepare text, train the same model on one device and on several, and draw the comparison."""

from dsgpt.common.command_line import run_script
from dsgpt.demo import main

if __name__ == "__main__":
    run_script(main, kept="make demo continues from the last checkpoint")
