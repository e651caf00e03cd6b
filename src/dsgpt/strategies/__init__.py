"""Ways to execute an optimizer step, with the optimizer and its schedule. `base.py` is the contract."""
