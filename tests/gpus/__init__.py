"""Tests of what depends on the device, and of the GPU gate."""
