"""Processes: workers that run cases, the server that forks them, the stacks that they write, and the outcomes that they send."""
