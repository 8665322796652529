"""How much memory was held, and by whom."""
