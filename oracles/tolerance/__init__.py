"""How far a right result may be from the oracle's: evaluation orders, allowances and bounds."""
