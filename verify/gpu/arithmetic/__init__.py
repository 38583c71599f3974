"""What a device computes: probes that measure its arithmetic, and a table of what they measured on each known card."""
