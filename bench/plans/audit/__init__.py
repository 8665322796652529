"""Counterfactual audits: a run is repeated on data of which something is known, and judged by that."""
