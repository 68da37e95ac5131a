"""Code that several families of defenses share."""
