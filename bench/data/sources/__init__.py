"""Where tokens come from: each source by name, and how its files are found, made, fetched and checked."""
