"""Drafting of static and grown trees with a model that reads pairs of feature and token."""
