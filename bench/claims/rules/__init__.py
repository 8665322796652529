"""When a claim holds: each rule a function of the claim (bench/claims/claim.py) -> (passed, evidence)."""
