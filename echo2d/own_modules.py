"""Finds the modules of the operator's: tasks, scorers, environments, losses, advantages.

They are looked for behind all that is installed, in run.toml's folder and in those of run.modules: a
file that happens to lie there never stands for a library.
"""

import os
import sys
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.registry import load


def load_own(entry: str) -> Any:
    """Import what an operator's "module:attribute" names. OperatorFault: it does not exist.

    What the module raises while it is imported is passed on.
    """
    module, _, attribute = entry.partition(":")
    if not (module and attribute):
        raise OperatorFault(f"expected package.module:name; found {entry!r}")
    try:
        return load(entry)
    except ModuleNotFoundError as error:
        # It may be another module, which this one imports.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise OperatorFault(
            f"there is no module {error.name!r}; put it beside run.toml, name its folder in "
            f"run.modules, or install it; Python looked in {_places()}"
        ) from error
    except AttributeError as error:
        found = sys.modules.get(module)
        if found is None or hasattr(found, attribute):
            raise
        where = getattr(found, "__file__", None) or "a folder without code"
        raise OperatorFault(f"module {module!r}, {where}, has no {attribute!r}") from error


def _places() -> str:
    """Where Python looks for modules besides its own library, and which folders are closed to this user."""
    places = [path for path in sys.path if not path.startswith(sys.base_prefix)]
    closed = {path for path in places if not os.access(path, os.R_OK | os.X_OK)}
    return ", ".join(
        f"{path} (which user {os.getuid()} cannot read)" if path in closed else path
        for path in places
    )
