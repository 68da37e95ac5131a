"""How a client trains: models, tasks, local steps, clipping, and who holds which data."""
