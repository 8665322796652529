"""Records -> static pages that open from a file, offline.

spec.py says what is drawn, from numbers, png.py draws it on paper (bench/web/ in a browser); memory.py is a run's memory;
run_page.py, race_page.py and site.py say what is on a page; cli.py is ./run.sh report.
"""
