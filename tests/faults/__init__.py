"""Defenses that lie: each keeps the claim and the law of a shipped defense, and its code breaks them in one way."""
