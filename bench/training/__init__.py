"""One rank of one run: build, warm up, train, record.  loop.py is the timed loop, clock.py what counts."""
