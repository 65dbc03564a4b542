"""Measuring: prompts, interleaved benchmarks, parity with the target, and rendering results."""
