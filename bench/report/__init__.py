"""Records -> static pages that open from a file, offline.

spec.py says what is drawn, from numbers; page.py and assets/ draw it in a browser, png.py on paper; run_page.py,
race_page.py and site.py say what is on a page; cli.py is ./run.sh report.  All text is somebody else's: escaped in page.py.
"""
