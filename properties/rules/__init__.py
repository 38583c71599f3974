"""Rules: the gated delta rule, the delta rule and KDA as one call."""
