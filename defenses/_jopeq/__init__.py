"""JoPEQ: quantizer, lattices, and the privacy that its noise proves."""
