"""What published changes to Gated DeltaNet claim, settled with numbers: each change before and after, timed by turns and judged.

Forms of one computation, the one before a change and the one after it, are timed in the same process by turns, so that what drifts
drifts for both, and both are judged against the float64 truth, and compared with each other, by the laws of every check.
"""
