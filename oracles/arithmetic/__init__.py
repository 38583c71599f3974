"""How numbers are rounded: formats, grids, operands of products, and bits from a counter."""
