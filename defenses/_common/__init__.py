"""What several families of defenses share."""
