"""Studies: cells to run, the processes that run them, and the folder of results."""
