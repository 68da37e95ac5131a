"""The command, and the pytest plugin."""
