"""Tests of the Falcon drafter."""
