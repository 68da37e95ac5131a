"""The federated loop: rounds of messages, what an adversary sees of them, and defenses and attacks by name."""
