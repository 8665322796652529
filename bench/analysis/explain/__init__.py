"""Explains why a step takes as long as it does: from the device's limit upwards, in parts that add up to the whole."""
