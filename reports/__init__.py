"""Tables and HTML pages from stored results; imports no torch."""
