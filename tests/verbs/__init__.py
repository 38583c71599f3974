"""Tests of the command line, its pages and its pytest plugin."""
