"""The built-in adapters, in one or several modules for each library, and how adapters are loaded."""
