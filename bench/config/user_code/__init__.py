"""A user's own code: classes named by an import path, and the files of a training script."""
