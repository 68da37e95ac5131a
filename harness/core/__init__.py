"""The base of all other packages: parameters and random draws, messages and claims, cells and results."""
