"""Drafters: their common base, and one folder for each kind."""
