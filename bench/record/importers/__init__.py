"""Training logs of other harnesses -> records.  One file a format; records.py makes records of what they find."""
