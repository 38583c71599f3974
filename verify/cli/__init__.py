"""The command line, with one module for each verb, and the pytest plugin."""
