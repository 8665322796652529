"""Optional measurements: one a file, one yaml each in conf/instruments/, loaded only when chosen."""
