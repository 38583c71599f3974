"""What is right, and how far off a finite-precision answer may be: float64, torch only, imports nothing from above."""
