"""Gradient matching and shadow models: the engines of several attacks."""
