"""Tests of the scripts in benchmarks/ that others build on."""
