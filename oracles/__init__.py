"""What is right, and how large the error of a finite-precision answer may be, in float64. Its modules need torch only."""

PRODUCTS = ("ieee", "tf32")  # how an implementation multiplies float32 matrices; here, so that it is known without torch
