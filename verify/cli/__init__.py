"""The command line, a module a verb, and the pytest plugin."""
