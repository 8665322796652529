"""Optional measurements: each is one file here and one yaml in conf/instruments/, loaded only when chosen."""
