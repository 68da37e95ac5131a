"""Analog over-the-air aggregation: formulas and channel."""
