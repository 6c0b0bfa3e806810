"""Finds the operator's own modules: tasks, scorers, environments, losses, advantages.

Python looks for them in the folder of run.toml and in the folders of run.modules, after all installed packages. So a
file in these folders never replaces a library.
"""

import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo2d.errors import OperatorFault
from echo2d.registry import load

if TYPE_CHECKING:
    import ast

TRACE_CHARS_MAX = 4000  # the end of a traceback is kept
PLACE_CHARS_MAX = 500
_OWN_CODE = str(Path(__file__).parent) + os.sep


def load_own(entry: str) -> Any:
    """Import the object that an operator names as "module:attribute". OperatorFault: it does not exist.

    If the module raises an error while it is imported, this error is passed on.
    """
    module, _, attribute = entry.partition(":")
    if not (module and attribute):
        raise OperatorFault(f"expected package.module:name; found {entry!r}")
    try:
        return load(entry)
    except ModuleNotFoundError as error:
        # The missing module may be another one that this module imports. Then the error is passed on.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise OperatorFault(
            f"there is no module {module!r}; {_hint(module)}; Python looked in {_places()}"
        ) from error
    except AttributeError as error:
        found = sys.modules.get(module)
        if found is None or hasattr(found, attribute):
            raise
        where = getattr(found, "__file__", None) or "a folder without code"
        raise OperatorFault(_has_no(module, where, attribute)) from error


def require_own(entry: str, folders: Iterable[Path]) -> None:
    """OperatorFault: `load_own` would not find the module, or the name in it, or the function does not take one
    argument. Nothing is imported.

    folders: the folder of run.toml, and the folders of run.modules.
    """
    # This import stands here because no task needs it.
    import ast
    from importlib.machinery import PathFinder

    module, _, attribute = entry.partition(":")
    if not (module and attribute):
        raise OperatorFault(f"expected package.module:name; found {entry!r}")
    places = [*sys.path, *map(str, folders)]
    spec, parts = None, module.split(".")
    for count, name in enumerate(parts, 1):
        # A package that is imported already may have come from elsewhere, as that of a checkout does.
        known = sys.modules.get(".".join(parts[:count]))
        spec = known.__spec__ if known is not None else PathFinder.find_spec(name, places)
        if spec is None:
            raise OperatorFault(f"there is no module {module!r}; {_hint(module)}")
        places = list(spec.submodule_search_locations or ())
    source = Path(spec.origin) if spec is not None and spec.origin else None
    if source is None or source.suffix != ".py":
        return
    try:
        tree = ast.parse(source.read_bytes(), source.name)
    except (OSError, SyntaxError, ValueError) as error:
        raise OperatorFault(f"module {module!r}, {source}, cannot be read: {error}") from error
    names = set(_names_in(tree))
    # If a module has a star import or __getattr__, it may have names that its text does not show.
    if attribute not in names and not {"*", "__getattr__"} & names:
        raise OperatorFault(_has_no(module, str(source), attribute))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute and not node.decorator_list:
            _require_one_argument(entry, node.args)


def _require_one_argument(entry: str, takes: "ast.arguments") -> None:
    """OperatorFault: a function with these parameters cannot be called with one argument."""
    import ast

    ordered = [*takes.posonlyargs, *takes.args]
    if (
        len(ordered) - len(takes.defaults) > 1
        or not (ordered or takes.vararg)
        or None in takes.kw_defaults
    ):
        raise OperatorFault(f"{entry} takes ({ast.unparse(takes)}); expected one argument")


def _names_in(tree: "ast.Module") -> Iterator[str]:
    """All names that the module defines or imports anywhere in its text."""
    import ast

    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.alias(name, asname):
                yield asname or name.partition(".")[0]
            case ast.Name(name, ast.Store()):
                yield name


def place_of(error: BaseException) -> tuple[str, str]:
    """The place at which the operator's code raised this error, as "FILE:LINE in FUNCTION", and the traceback from the
    first frame of the operator's code on. Both are empty if none of that code was running.
    """
    # This import stands here because only a task that fails needs it.
    import traceback

    frames = list(traceback.walk_tb(error.__traceback__))
    own = [number for number, (frame, line) in enumerate(frames) if place_in(frame.f_code, line)]
    if not own:
        return "", ""
    frame, line = frames[own[-1]]
    trace = error.__traceback__
    for _ in range(own[0]):
        trace = trace and trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return place_in(frame.f_code, line), text[-TRACE_CHARS_MAX:]


def place_in(code: types.CodeType, line: int) -> str:
    """A place in the operator's code, as text; empty: the code belongs to a library."""
    if code.co_filename.startswith((_OWN_CODE, sys.prefix, sys.base_prefix, "<")):
        return ""
    return f"{code.co_filename}:{line} in {code.co_name}"[:PLACE_CHARS_MAX]


def _has_no(module: str, where: str, attribute: str) -> str:
    own = module.partition(".")[0] in sys.stdlib_module_names
    hint = "; your module has the name of a module of Python: rename it" if own else ""
    return f"module {module!r}, {where}, has no {attribute!r}{hint}"


def _hint(module: str) -> str:
    if module.endswith(".py"):
        return "leave .py out"
    return "put it beside run.toml, name its folder in run.modules, or install it"


def _places() -> str:
    """The folders in which Python looks for modules, without its own library. Folders that this user cannot read are
    marked.
    """
    paths = (os.path.normpath(path) for path in sys.path if not path.startswith(sys.base_prefix))
    places = [path for path in dict.fromkeys(paths) if not path.startswith("__editable__")]
    closed = {path for path in places if not os.access(path, os.R_OK | os.X_OK)}
    return ", ".join(
        f"{path} (which user {os.getuid()} cannot read)" if path in closed else path
        for path in places
    )
