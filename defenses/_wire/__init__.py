"""Entropy coding and the Walsh-Hadamard transform."""
