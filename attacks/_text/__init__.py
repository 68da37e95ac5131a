"""Text from gradients: what a network of tokens reads where, bags of words, spans and a search by likelihood."""
