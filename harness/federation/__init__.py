"""The federated loop: rounds of messages, what an adversary sees of them, and the parts by name."""
