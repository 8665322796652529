"""Records -> static pages that open from a file, offline (run_page, race_page, site), and tables (table_*)."""
