"""Which Python of the implementation ran, and what the last lines say of it."""
