"""Drafters: their common base, and one file or folder for each kind."""
