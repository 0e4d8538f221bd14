"""Lets PyPI's torchvision be imported beside a torch that is not its own, wherever this folder is on the path.

vLLM needs the Python part of torchvision alone; that asks, as it is imported, for operators which its compiled part
would have made. So they are declared before, and stay without an implementation.
"""

import sys
from importlib.abc import MetaPathFinder


class DeclareOperators(MetaPathFinder):
    """Finds nothing; acts once, when torchvision is looked for."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            DeclareOperators.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                DeclareOperators.library.define(f"{operator}() -> ()")


sys.meta_path.insert(0, DeclareOperators())
