"""Is B faster than A?  May the runs be compared, what differs, how much, the verdict."""
