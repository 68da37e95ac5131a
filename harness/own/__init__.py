"""Bring your own: models, data, messages, federations, defenses and attacks from elsewhere."""
