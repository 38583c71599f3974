"""The gated delta rule token by token, chunk by chunk and differentiated, and what a disturbance does to it."""
