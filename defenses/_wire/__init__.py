"""Entropy codes and transforms of messages."""
