"""A step on more GPUs than were measured: links and their collectives, the projection, and what it was checked on."""
