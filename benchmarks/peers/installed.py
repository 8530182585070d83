"""Functions of an installed package, run from its own file without importing the package around it.

Invariant: what runs is the text of the installed file, unchanged; only the definitions that are named are run, and what
else they use is given by the caller. Annotations are not evaluated.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any


class Missing(Exception):
    """A peer's package is not installed, or no longer has what is called."""


def version(package: str) -> str:
    """The installed version of a package. Raises Missing."""
    try:
        return distribution(package).version
    except PackageNotFoundError as error:
        raise Missing(f"{package} is not installed: run make .peers/.ready") from error


def take(package: str, file: str, names: Sequence[str], known: Mapping[str, Any]) -> Any:  # Any: its functions
    """A module of the named definitions of one of a package's files; `known` are the other names they use.

    Raises Missing.
    """
    version(package)
    path = Path(str(distribution(package).locate_file(file)))
    if not path.is_file():
        raise Missing(f"{package} {version(package)} has no {file}: adapt benchmarks/peers")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, _DEFINITIONS) and node.name in names]
    absent = set(names) - {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}
    if absent:
        raise Missing(
            f"{package} {version(package)}: {file} no longer defines {sorted(absent)}: adapt benchmarks/peers"
        )
    module = ModuleType(f"taken.{file.removesuffix('.py').replace('/', '.')}")
    sys.modules[module.__name__] = module  # dataclasses look up the module of a class
    module.__dict__.update(known)
    exec(compile(tree, str(path), "exec"), module.__dict__)  # compile hands on this module's "annotations"
    return module


def bare(package: str, *inner: str) -> None:
    """Make a package and packages in it importable without running their `__init__`, which imports the whole of it.

    Raises Missing.
    """
    version(package)
    for name in (package, *inner):
        module = ModuleType(name)
        module.__path__ = [str(distribution(package).locate_file(name.replace(".", "/")))]
        sys.modules[name] = module


_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
