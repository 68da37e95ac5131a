"""CEPAM: mechanism, wire and claim."""
