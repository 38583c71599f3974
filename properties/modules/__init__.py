"""Modules: the convolutions, gates and norms of a layer, each as one call."""
