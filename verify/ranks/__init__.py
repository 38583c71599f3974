"""Ranks: collectives, groups of processes that answer as one, torchrun, and what became of ranks that crash or hang."""
