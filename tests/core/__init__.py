"""Tests of `core/`: trees, masks, draws, accepted paths and counts."""
