"""Claims of differential privacy, what is proved, and measured lower bounds."""
