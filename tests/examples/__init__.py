"""Tests of what `examples/` serve and show."""
