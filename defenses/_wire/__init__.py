"""Entropy coding."""
