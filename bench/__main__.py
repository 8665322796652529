"""python -m bench [verb] [...], which ./run.sh calls."""

from bench.cli.main import run

if __name__ == "__main__":
    run()
