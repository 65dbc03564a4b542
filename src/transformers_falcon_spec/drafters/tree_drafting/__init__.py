"""Drafting trees with a model that reads pairs of feature and token: static ones, and ones that grow where the drafter is sure."""
