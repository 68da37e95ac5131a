"""JoPEQ: quantizer, lattices, and what its noise proves."""
