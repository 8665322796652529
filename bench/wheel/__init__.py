"""What a wheel has and a checkout does not: the command that is on the path."""
