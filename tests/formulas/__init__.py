"""Tests of the formulas: they need oracles/ and properties/ alone."""
