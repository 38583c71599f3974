"""Measurements of what published changes to Gated DeltaNet claim: each change before and after, timed and judged.

The two forms of a computation, before and after a change, are timed alternately in the same process, so that drift affects both.
Both are judged against the float64 truth with the tolerances of every check, and compared with each other.
"""
