"""Turns records into documents, pages (verdicts, race_page, run_page, sweep_page, trace_page, site) and tables."""
