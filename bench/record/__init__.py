"""Writes, reads, verifies and lists run folders, and keeps the ledger of every run that was started."""
