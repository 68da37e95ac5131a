"""Tables and HTML pages from stored results; never imports torch."""
