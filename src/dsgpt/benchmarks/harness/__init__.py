"""What all benchmarks share: starting ranks, collecting results, records and pages."""
