"""Labels, inferred from a gradient."""
