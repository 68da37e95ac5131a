"""The files of `leakgauge new`: a defense, an attack and a task that run unchanged, each with a small study."""
