"""Stands in for torchvision, which SGLang and transformers import for images: text models never use it.

Any submodule can be imported and any name taken from it; taking a name from such a name (an enumeration's member)
gives its lower-case text, and making an instance fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

__version__ = "0.0.0"


class _AnyMember(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name.lower()


class _NotHere(metaclass=_AnyMember):
    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError(f"torchvision's {type(self).__name__} was used: only text models run here")


def __getattr__(name: str) -> type:
    """A class of that name, empty."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyMember(name, (_NotHere,), {})


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__dict__["__getattr__"] = __getattr__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the module's names are made when they are asked for."""


sys.meta_path.append(_Submodules())
