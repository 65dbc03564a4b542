"""Captured steps on a device that pretends to be CUDA: real numbers on a CPU, and CUDA's rules on what belongs where."""
