"""Tests of adapters for other libraries, runtimes and languages."""
