"""How a client trains: models, tasks, local steps, clipping, and the partition of the data."""
