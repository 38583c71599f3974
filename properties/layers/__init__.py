"""Layers: a whole GDN or KDA layer with its parameters and its cache."""
