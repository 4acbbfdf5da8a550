"""Measurements of the kernels; whole-system ones are in the repository's benchmarks/ folder."""
