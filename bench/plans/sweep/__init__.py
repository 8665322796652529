"""Many runs by one command: their points from Hydra, each a run with its own record."""
