"""Cases: one input of an implementation as plain data, written as a line and read back."""
