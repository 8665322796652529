"""The referee of NanoGPT speedruns.  python -m bench --help"""

__version__ = "0.2.0"
