"""Defenses that lie: each keeps the claim and the distribution of a shipped defense, but its code breaks them."""
