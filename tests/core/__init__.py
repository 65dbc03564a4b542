"""Tests of `core/`: trees, masks, draws, the verdict and the counts."""
