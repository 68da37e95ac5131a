"""Two sets of results side by side: the rules by which a check fails."""
