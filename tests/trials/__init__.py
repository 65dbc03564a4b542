"""Trials: calls of `generate` drawn at random from a seed, each written without and with a drafter, and compared in all that a caller sees."""
