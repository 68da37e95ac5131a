"""Local training of clients: models, tasks, local steps, clipping, and the partition of the data."""
