"""Scores of membership."""
