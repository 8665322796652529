"""What a terminal shows: its width, colours, tables."""
