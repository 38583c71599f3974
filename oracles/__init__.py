"""What is right, and how large the error of a finite-precision answer may be, in float64. Needs torch only."""
