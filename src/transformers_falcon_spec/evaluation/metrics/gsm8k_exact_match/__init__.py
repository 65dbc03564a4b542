"""Answers to sums in words."""
