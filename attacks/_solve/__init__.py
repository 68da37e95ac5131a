"""Reconstructions in closed form, layer by layer."""
