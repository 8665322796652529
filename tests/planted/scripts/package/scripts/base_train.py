"""python -m scripts.base_train NUM_STEPS, from the folder above; nothing is installed."""

import sys

from engine.steps import train

if __name__ == "__main__":
    train("configs/debug.toml", int(sys.argv[1]))
