"""On PYTHONPATH: where STAND_IN_DEVICE names device.cpp's library, importing torch gives one that has the GPUs."""

import importlib.abc
import importlib.machinery
import os
import sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        import ctypes

        spec = importlib.machinery.PathFinder.find_spec(name, path)
        library = ctypes.CDLL(os.environ["STAND_IN_DEVICE"])  # before torch, which asks once whether there is a GPU
        execute, read = spec.loader.exec_module, spec.loader.get_data

        def exec_module(module):
            execute(module)
            sys.path.insert(0, os.path.dirname(__file__))
            import cuda

            sys.path.pop(0)
            cuda.install(library)

        def get_data(name):  # of version.py, in which a CPU build says that it has no CUDA
            return read(name).replace(b"cuda: Optional[str] = None", b"cuda: Optional[str] = '13.0'")

        spec.loader.exec_module, spec.loader.get_data = exec_module, get_data
        return spec


if os.environ.get("STAND_IN_DEVICE") and sys.platform == "linux":
    sys.meta_path.insert(0, Finder())
