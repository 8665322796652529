"""What a run is to do: every setting as a typed dataclass, composed by Hydra, resolved for this machine."""
