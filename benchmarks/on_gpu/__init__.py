"""The parts of `benchmarks/gpu.py`: what is measured in which order, how, and what it must show."""
