"""Imports training logs of other programs: dialects.py reads them, records.py makes records of the runs."""
