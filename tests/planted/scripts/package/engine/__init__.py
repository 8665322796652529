"""A package with a folder data/ of its own, as KempnerForge has; for tests/test_programs.py."""
