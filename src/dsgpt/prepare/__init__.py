"""From text to token files. The scripts of ``data_prep/`` call it."""
