"""What `leakgauge new` writes: a defense, an attack and a task that run as they are, each with a small study."""
