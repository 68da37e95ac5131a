"""One defense a file; the registry finds them by scanning this folder."""
