"""One rank of one run: build, warm up, train, record.  run.py tells it in order, timing/ says what counts as time."""
