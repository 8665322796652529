"""Several runs by a plan, interleaved, in one session."""
