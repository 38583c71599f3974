"""What must hold, and for which inputs: domains, Hypothesis strategies and laws. Of this project, imports `oracles` only."""
