"""Tests of paths that several ranks share."""
