"""The bench of an adapter: where its tensors are placed, its calls watched, and its outputs taken."""
