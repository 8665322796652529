"""The sources of tokens, and how their files are found, made, fetched and checked."""
