"""Ways to execute an optimizer step. ``base.py`` is the contract, ``build.py`` chooses."""
