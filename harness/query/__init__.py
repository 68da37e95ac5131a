"""Figures and published statements as queries on the values of a run."""
