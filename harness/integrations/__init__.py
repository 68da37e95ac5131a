"""User code and data: models, data, messages, federations, defenses and attacks from outside leakgauge."""
