"""Proofs and measurements of the product, each run by ``src/benchmark.py``."""
