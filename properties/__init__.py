"""What must hold, and for which inputs: domains, Hypothesis strategies and laws. Imports `oracles` only."""
