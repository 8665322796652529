"""What the devices of a run did meanwhile: sampled in a process of its own, joined to the run afterwards."""
