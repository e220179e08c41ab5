"""Emulated devices, slow links and faults, for tests and benchmarks."""
