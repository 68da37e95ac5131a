"""What a defense claims, what is proved, and lower bounds that are measured."""
