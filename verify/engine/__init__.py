"""The check: draw cases, run them in workers, decide the verdict, then shrink and explain what is broken."""
