"""Counterfactual audits: a run is made again on data about which something is known, and held to that."""
