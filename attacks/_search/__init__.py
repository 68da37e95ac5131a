"""Optimizers over candidate images."""
