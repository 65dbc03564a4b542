"""Checks that a drafter fits its target and that its files are whole."""
