"""Comparison of two sets of results, and the rules by which a check fails."""
