"""Traces: what a serving engine is asked over several steps."""
