"""Tests of the laws: each holds for right implementations and rejects wrong ones."""
