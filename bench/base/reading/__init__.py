"""The one way in for files that others may have written: records, logs, plans, claims."""
