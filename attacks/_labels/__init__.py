"""Inference of labels from a gradient."""
