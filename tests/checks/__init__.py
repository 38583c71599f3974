"""Tests of what runs a check: drawing, workers, judging, shrinking, findings."""
