"""Measurements that need the tests' own files or another program: see __main__.py."""
