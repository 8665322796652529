"""Does a claim hold by the rules of its track, and who is first."""
