"""The harness: the federated loop, audits, studies, the gate and the command."""
