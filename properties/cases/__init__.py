"""Cases: one input of an implementation as plain data, written as a line and parsed again."""
