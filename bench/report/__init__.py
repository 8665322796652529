"""Records -> answers: documents and pages (verdicts, race_page, run_page, sweep_page, trace_page, site), tables."""
