"""Public names that are imported on first use, so that a package costs nothing before it is used."""

import importlib
from collections.abc import Callable
from typing import Any


def lazy_attributes(namespace: dict[str, Any], sources: dict[str, str]) -> tuple[Callable, Callable]:
    """The `__getattr__` and `__dir__` (PEP 562) of a package.

    Args:
        namespace: `globals()` of the package.
        sources: public name -> module that defines it.
    """

    def getattribute(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        namespace[name] = getattr(importlib.import_module(sources[name]), name)
        return namespace[name]

    return getattribute, lambda: sorted({*namespace, *sources})
