"""What is asked: every setting as a typed dataclass, composed by Hydra, resolved for this machine."""
