"""Tests of how kernels run: the interpreter of Triton, policies of tuning, compilers, launches, reach."""
