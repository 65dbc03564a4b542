"""Tests of the drafters."""
