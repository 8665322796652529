"""The one way in for files that somebody else may have written: records, logs, plans, claims."""
