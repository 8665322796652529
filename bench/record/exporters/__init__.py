"""Records for other programs."""
