"""Print one table of figures about the source tree: sizes, surface, folders, imports, names,
comments, functions, tests.

    python tools/house_report.py [CHECKOUT] [--json] [--imported]

It uses only the standard library and imports nothing of the checkout, so that it also reads old
commits (a clone or a `git worktree` of one), and two commits can be compared by the same rules:

- A module is a `.py` file with at least one line of code. Its lines are all of its lines.
- An import counts wherever it is written, also inside functions and under `TYPE_CHECKING`. The
  longest chain is counted in modules, after the modules of an import cycle have been merged into
  one.
- A code line has a token that is neither a comment nor part of a docstring.
- The length of a function is its lines from `def` to the end, without decorators.
- A command is a function decorated with `click.command` or with `.command` of a group. An option is
  a decorator `click.option` of a function: options that a helper adds to several commands do not
  count. `--imported` imports the checkout's `echo2d.cli` and adds the figures that click itself gives:
  there an option counts for each command that has it.
- A key of the configuration is a field whose value is `key(...)`; those of simulations are in
  `echo2d/plan` (before, `echo2d/sim`).
- A constant is an assignment at the top of a module, without an annotation, to one upper-case name.
- A fragment is a module of the wheel with at most FRAGMENT_LINES lines that at most FRAGMENT_IMPORTERS
  others import: it may be too small to be an idea of its own. Packages, main modules and modules that the
  registry names are no fragments.

The wheel is echo2d and learner; its commands, options, keys and constants are counted there. Names,
comments, lines over 100 columns and functions are counted in echo2d and learner, without
tests and tools.
"""

import argparse
import ast
import importlib
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

AREAS = ("echo2d", "learner", "tools", "tests")
PRODUCT = ("echo2d", "learner")
COLUMNS = 100
CONSTANT = re.compile("_?[A-Z][A-Z0-9_]*")
SIMULATED = ("echo2d.plan.", "echo2d.sim.")
FRAGMENT_LINES = 75
FRAGMENT_IMPORTERS = 1
REGISTRY = "echo2d.registry"
# Modules that no other module imports. A vLLM server loads the last one.
STARTED = ("__init__.py", "__main__.py", "main.py", "echo2d_worker.py")
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file, read once."""

    path: Path  # relative to the checkout
    text: str
    tree: ast.Module
    code_lines: int
    own_line_comments: int

    @classmethod
    def read(cls, checkout: Path, path: Path) -> "Module":
        return cls.parse(path, (checkout / path).read_text())

    @classmethod
    def parse(cls, path: Path, text: str) -> "Module":
        tree = ast.parse(text)
        code, comments = count_lines(text, docstring_lines(tree))
        return cls(path, text, tree, code, comments)

    @property
    def area(self) -> str:
        return self.path.parts[0]

    @property
    def name(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def imported_as(self) -> str:
        """The module's name in an installation, where the learner is a package of echo2d."""
        return f"echo2d.{self.name}" if self.area == "learner" else self.name

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("checkout", type=Path, nargs="?", default=here)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead")
    parser.add_argument(
        "--imported", action="store_true", help="also ask click; imports the checkout"
    )
    options = parser.parse_args()
    figures = report(read_modules(options.checkout))
    if options.imported:
        sys.path.insert(0, str(options.checkout.resolve()))
        figures |= offered(importlib.import_module("echo2d.cli").main)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        width = max(map(len, figures))
        for what, value in figures.items():
            print(
                f"{what:{width}}  {value:,}"
                if isinstance(value, int)
                else f"{what:{width}}  {value}"
            )


def report(modules: list[Module]) -> dict[str, int | float | str]:
    """Every row of the table, in the order in which it is printed."""
    product = [module for module in modules if module.area in PRODUCT]
    figures: dict[str, int | float | str] = {}
    for area in AREAS:
        figures[f"modules: {area}"] = sum(module.area == area for module in modules)
    for area in AREAS:
        figures[f"lines: {area}"] = count(modules, area)
    figures |= surface(product)
    folder, files = largest_folder(product)
    figures["largest flat folder: modules"] = files
    figures["largest flat folder: path"] = folder
    for package in ("echo2d.core", "echo2d"):
        graph = import_graph(modules, package)
        cycles = [group for group in strong_components(graph) if len(group) > 1]
        figures[f"longest import chain: {package}"] = longest_chain(graph)
        figures[f"modules in import cycles: {package}"] = sum(map(len, cycles))
    figures["public names at top level"] = sum(len(public_names(module.tree)) for module in product)
    classes = Counter(name for module in product for name in public_classes(module.tree))
    figures["public class names defined twice or more"] = sum(n > 1 for n in classes.values())
    comments, code = (
        sum(module.own_line_comments for module in product),
        sum(module.code_lines for module in product),
    )
    figures["own-line comments"] = comments
    figures["own-line comments per 100 code lines"] = round(100 * comments / max(1, code), 2)
    figures[f"lines over {COLUMNS} columns"] = sum(
        len(line) > COLUMNS for module in product for line in module.lines
    )
    lengths = sorted(function_lengths(product))
    figures["functions"] = len(lengths)
    figures["function lines: median"] = int(median(lengths)) if lengths else 0
    figures["function lines: 90th percentile"] = lengths[len(lengths) * 9 // 10] if lengths else 0
    figures["function lines: longest"] = lengths[-1] if lengths else 0
    product_lines = sum(count(modules, area) for area in PRODUCT)
    figures["test lines per code line"] = round(count(modules, "tests") / max(1, product_lines), 2)
    return figures


def surface(product: list[Module]) -> dict[str, int]:
    """The figures of the wheel that a budget limits, counted in its source."""
    figures = {
        f"code lines: {area}": sum(each.code_lines for each in product if each.area == area)
        for area in PRODUCT
    }
    decorators = Counter(name for module in product for name in decorator_names(module.tree))
    figures["commands"] = sum(n for name, n in decorators.items() if name.endswith(".command"))
    figures["options"] = decorators["click.option"]
    keys = [module for module in product for _ in range(count_keys(module.tree))]
    figures["keys"] = len(keys)
    figures["keys: of simulations"] = sum(each.name.startswith(SIMULATED) for each in keys)
    figures["constants"] = sum(count_constants(module.tree) for module in product)
    figures[f"modules of at most {FRAGMENT_LINES} lines with one importer or none"] = len(
        fragments(product)
    )
    return figures


def fragments(product: list[Module]) -> list[Module]:
    """The fragments among these modules."""
    inside = {module.imported_as: module for module in product}
    importers: dict[str, set[str]] = {name: set() for name in inside}
    for name, module in inside.items():
        for target in imported_names(module):
            found = target if target in inside else target.rpartition(".")[0]
            if found in inside and found != name:
                importers[found].add(name)
    registered = inside[REGISTRY].text if REGISTRY in inside else ""
    return [
        module
        for name, module in inside.items()
        if len(module.lines) <= FRAGMENT_LINES
        and len(importers[name]) <= FRAGMENT_IMPORTERS
        and module.path.name not in STARTED
        and name not in registered
    ]


def decorator_names(tree: ast.Module) -> Iterator[str]:
    """The names of the functions' decorators, without arguments."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            for each in node.decorator_list:
                yield ast.unparse(each.func if isinstance(each, ast.Call) else each)


def count_keys(tree: ast.Module) -> int:
    return sum(
        isinstance(node, ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "key"
        for table in ast.walk(tree)
        if isinstance(table, ast.ClassDef)
        for node in table.body
    )


def count_constants(tree: ast.Module) -> int:
    return sum(
        isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id) is not None
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    )


def offered(group: Any) -> dict[str, int]:
    """The commands and options that click itself offers, without those of another distribution.

    group: the imported `echo2d.cli.main`. A group that can be called without a command is a command, too.
    """
    commands, options, waiting = 0, 0, [group]
    while waiting:
        each = waiting.pop()
        waiting += getattr(each, "commands", {}).values()
        if each.callback is None or not each.callback.__module__.startswith("echo2d."):
            continue
        runs = not hasattr(each, "commands") or each.invoke_without_command
        commands += runs
        options += sum(parameter.param_type_name == "option" for parameter in each.params)
    return {"commands: offered by click": commands, "options: offered by click": options}


def read_modules(checkout: Path) -> list[Module]:
    """The modules of all areas; packages' empty `__init__.py` files are left out."""
    paths = (
        path.relative_to(checkout)
        for area in AREAS
        for path in sorted((checkout / area).rglob("*.py"))
    )
    return [module for path in paths if (module := Module.read(checkout, path)).code_lines]


def count(modules: Iterable[Module], area: str) -> int:
    """The lines of an area."""
    return sum(len(module.lines) for module in modules if module.area == area)


def largest_folder(modules: Iterable[Module]) -> tuple[str, int]:
    """The folder with the most modules directly in it."""
    counts = Counter(str(module.path.parent) for module in modules)
    return counts.most_common(1)[0] if counts else ("-", 0)


def import_graph(modules: Iterable[Module], package: str) -> dict[str, set[str]]:
    """Which modules of a package import which others of it."""
    inside = {
        module.name: module
        for module in modules
        if module.name == package or module.name.startswith(f"{package}.")
    }
    graph: dict[str, set[str]] = {name: set() for name in inside}
    for name, module in inside.items():
        for target in imported_names(module):
            # `from a.b import c` names a module `a.b.c`, or a name that the module `a.b` defines.
            found = target if target in inside else target.rpartition(".")[0]
            if found in inside and found != name:
                graph[name].add(found)
    return graph


def imported_names(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def strong_components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components, each after all components that it leads to (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            found.append(stack[start:])
            del stack[start:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def longest_chain(graph: Mapping[str, set[str]]) -> int:
    """The modules on the longest path; a cycle counts as one module."""
    depths: dict[str, int] = {}
    for group in strong_components(graph):
        below = {target for node in group for target in graph[node]} - set(group)
        depth = 1 + max((depths[target] for target in below), default=0)
        depths.update(dict.fromkeys(group, depth))
    return max(depths.values(), default=0)


def public_names(tree: ast.Module) -> set[str]:
    """The functions, classes and variables that a module defines at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def public_classes(tree: ast.Module) -> set[str]:
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def function_lengths(modules: Iterable[Module]) -> Iterator[int]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, Function) and node.end_lineno is not None:
                yield node.end_lineno - node.lineno + 1


def docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of the lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def count_lines(text: str, docstrings: set[int]) -> tuple[int, int]:
    """The number of code lines, and of comments on lines of their own."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in LAYOUT_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(comments - code)


if __name__ == "__main__":
    main()
