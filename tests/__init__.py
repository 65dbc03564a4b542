"""Tests, folder by folder as in `src/`. Shared: `conftest.py` (fixtures), `tiny.py` (models), `reference.py` (naive twins)."""
