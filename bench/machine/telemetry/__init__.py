"""What the devices of a run did meanwhile: sampled in a separate process, joined to the run afterwards."""
