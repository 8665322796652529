"""Static pages that open from a file, offline: page.py writes the html, chart.py says what is drawn, assets/ draw it.

All text is foreign: escaped in page.py.
"""
