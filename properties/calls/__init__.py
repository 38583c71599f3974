"""Calls: any function that its author describes by axes and a reference."""
