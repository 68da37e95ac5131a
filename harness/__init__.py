"""leakgauge: what a federated-learning defence really leaks."""

__version__ = "0.1.0"
