"""UDP: formulas and claim."""
