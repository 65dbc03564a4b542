"""Tests of `training/`: conversations, features, glancing, losses, and the Trainer."""
