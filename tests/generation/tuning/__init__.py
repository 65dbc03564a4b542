"""Tests of `generation/`: what touches Transformers' `generate`."""
