"""On PYTHONPATH: where STAND_IN_DEVICE names device.cpp's library, importing torch gives one that has the GPUs."""

import importlib.abc
import importlib.machinery
import os
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        import ctypes

        spec = importlib.machinery.PathFinder.find_spec(name, path)
        library = ctypes.CDLL(os.environ["STAND_IN_DEVICE"])  # before torch, which asks once whether there is a GPU
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            sys.path.insert(0, os.path.dirname(__file__))
            import cuda

            sys.path.pop(0)
            cuda.install(library)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("STAND_IN_DEVICE") and sys.platform == "linux":
    sys.meta_path.insert(0, Finder())
