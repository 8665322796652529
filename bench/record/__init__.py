"""The run folder: written, read, verified, listed; and the ledger of every started run."""
