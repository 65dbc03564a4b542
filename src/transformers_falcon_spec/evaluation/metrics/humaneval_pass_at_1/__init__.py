"""Programs that pass their tests."""
