"""Findings: where they are stored, which of them are known defects, and how they are reported."""
