"""Projects a step to more GPUs than were measured: links and their collectives, the projection, and its checks."""
