"""Processes: workers that run cases, the server that forks them, the stacks that they leave, and the outcome that comes back."""
