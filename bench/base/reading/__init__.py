"""Safe reading of files that others may have written: records, logs, plans, claims."""
