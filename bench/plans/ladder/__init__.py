"""The ladder: the speedrun's records raced against each other, read as a staircase."""
