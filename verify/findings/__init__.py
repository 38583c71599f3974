"""What was found: where findings are kept, which are known defects, and how they are reported."""
