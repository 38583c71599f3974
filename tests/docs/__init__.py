"""Tests of the project's own files: its pages, its layout, its results."""
