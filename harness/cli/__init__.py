"""The command `leakgauge`, its Python functions, and the pytest plugin."""
