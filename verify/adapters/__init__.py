"""The adapters that come with the toolkit, one module an implementation's home."""
