"""Ranks: collectives, groups of worker processes that answer as one, torchrun, and the diagnosis of ranks that crash or hang."""
