"""Tests of the zoo and of mutation."""
