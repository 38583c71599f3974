"""Paths: operations on the ranks of a mesh."""
