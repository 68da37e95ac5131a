"""Parameters and draws, messages and claims, cells and results: what every other room is built on."""
