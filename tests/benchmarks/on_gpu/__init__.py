"""Tests of `benchmarks/on_gpu/`."""
