"""What the harness itself costs."""
