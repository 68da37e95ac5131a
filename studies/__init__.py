"""Studies that ship with leakgauge, as TOML files."""
