"""Tests of `generation/static/`: decoding in tensors of fixed shape."""
