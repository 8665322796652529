"""The rules of claims: each is a function that takes a Claim and returns (passed, evidence)."""
