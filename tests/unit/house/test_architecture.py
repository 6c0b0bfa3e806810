"""The house rules that a machine can check. A failure names file, line and rule."""

import ast
import sys
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import REPO

SHELLS = {"net", "store", "engines", "tasks", "providers"}
# Who may import whom in echo2d. A name stands for a package, room or module and for all that is in it. The client
# stands between two rooms of net, `net.security` and `net.api`, so a learner loads no server.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "errors": set(),
    "registry": set(),
    "native": set(),
    "this_build": {"__init__", "core"},
    "core": {"native", "registry", "errors"},
    "config.tables": {"core", "errors"},
    "config.limits": {"quantities", "errors"},
    "sd_notify": set(),
    "stop_signals": set(),
    "process_environment": {"sd_notify"},
    "logs": {"errors"},
    "extras": {"errors"},
    "hub": {"errors"},
    "quantities": {"errors"},
    "threads": set(),
    "model_files": {"core", "errors"},
    "model_experts": {"core"},
    "adapters": {"model_files", "core", "errors"},
    "config": {"core", "registry", "errors"},
    **{shell: {"core", "errors", "threads"} for shell in SHELLS},
    "engines": {"model_experts", "model_files", "tinker", "core", "errors", "threads"},
    "texts": {"core", "errors"},
    "tinker": set(),
    "net": set(),
    "net.backoff": set(),
    "net.security": {"core", "errors"},
    "net.http": {"net.security", "core"},
    "net.peer": {"net.http", "net.security", "core", "errors"},
    "net.control": {
        "net.backoff",
        "net.http",
        "net.security",
        "this_build",
        "core",
        "errors",
    },
    "net.gateway": {"net.http", "net.security", "texts", "core", "errors"},
    "net.tinker": {
        "net.http",
        "net.security",
        "client.http",
        "client.tinker",
        "tinker",
        "core",
        "errors",
    },
    "net.api": {
        "net.gateway",
        "net.tinker",
        "net.http",
        "net.security",
        "client.http",
        "this_build",
        "core",
        "errors",
    },
    "own_modules": {"registry", "errors"},
    "tasks": {"core", "texts", "registry", "own_modules", "extras", "errors"},
    "plan": {"core", "quantities", "config", "registry", "errors"},
    "runtime": {
        "adapters",
        "model_files",
        "client.http",
        "this_build",
        "core",
        "config",
        "process_environment",
        "logs",
        "sd_notify",
        "stop_signals",
        "extras",
        "registry",
        "texts",
        "threads",
        "tinker",
        "errors",
    }
    | SHELLS,
    "client": {
        "model_files",
        "net.backoff",
        "net.security",
        "adapters",
        "store.snapshots",
        "this_build",
        "core",
        "errors",
    },
    "views": {"client", "core", "plan", "errors"},
    "recipes": {
        "config",
        "core",
        "demo",
        "learner",
        "model_files",
        "net",
        "runtime",
        "tasks",
        "texts",
        "errors",
    },
    "demo": {"views", "core", "config", "errors", "client", "runtime"} | SHELLS,
    "cli": {
        "config",
        "core.rules",
        "logs",
        "native",
        "quantities",
        "registry",
        "runtime",
        "client",
        "extras",
        "hub",
        "plan",
        "demo",
        "recipes",
        "learner",
        "views",
        "errors",
    },
    "learner": {
        "client",
        "config.checks",
        "config.coordinator",
        "config.run",
        "config.tables",
        "config.tasks",
        "core.base.model_config",
        "core.protocol.columns",
        "core.protocol.experts",
        "core.rules.table",
        "tasks",
        "texts",
        "extras",
        "logs",
        "model_experts",
        "own_modules",
        "sd_notify",
        "stop_signals",
        "this_build",
        "tinker",
    },
    "tools": {"config", "runtime", "client", "core", "store", "engines", "learner", "errors"},
}
# The rooms of tools/lab, a distribution of its own: each may import all of echo2d, and these rooms beside it. What is
# in the wheel may import none of them.
LAB_MAY_IMPORT: dict[str, set[str]] = {
    "standins": {"faults"},
    "faults": set(),
    "bench": {"standins", "faults"},
    "research": {"bench", "standins", "faults"},
    "cli": {"bench"},
    "__init__": set(),
}
# Who may import whom inside the core, besides `base` and `errors`. How weights spread (broadcast) and what workers
# write (work) do not know each other, and no kind of work knows another one; a relay knows nothing of the
# coordinator's side.
CORE_MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "weights": set(),
    "audit": {"protocol", "cluster", "rules"},
    "rules": {"protocol"},
    "capacity": {"rules"},
    "protocol": {"weights"},
    "topology": {"protocol"},
    "relay": {"protocol"},
    "status": {"capacity", "protocol", "rules"},
    "renting": {"capacity", "status"},
    "worker": {"weights", "protocol", "relay", "topology"},
    "cluster": {"protocol", "topology", "capacity", "rules"},
    "work": {"rules", "protocol", "cluster"},
    "work/training": {"rules", "protocol", "cluster", "audit", "work"},
    "work/evaluation": {"rules", "protocol", "cluster", "work"},
    "work/calls": {"rules", "protocol", "cluster", "status", "audit", "work"},
    "broadcast": {"rules", "weights", "protocol", "topology", "cluster"},
    "tinker": {"protocol", "cluster", "status"},
    "coordinator": {
        "tinker",
        "rules",
        "audit",
        "weights",
        "capacity",
        "protocol",
        "topology",
        "cluster",
        "work",
        "work/training",
        "work/evaluation",
        "work/calls",
        "broadcast",
        "status",
    },
}
# The rooms of the learner that each of its rooms may import, besides learner.config. Modules outside the rooms,
# such as the train loop, may import all.
LEARNER_MAY_IMPORT: dict[str, set[str]] = {
    "objective": set(),
    "ranks": set(),
    "batch": {"objective"},
    "saving": {"ranks"},
    "metrics": {"batch", "ranks"},
    "model": {"batch", "metrics", "objective", "ranks", "saving"},
    "tinker": {"batch", "model", "objective", "ranks", "saving"},
}
# Modules that only declare values; what uses them is tested.
DECLARATIONS = {
    Path(module)
    for module in (
        "protocol/control_messages",
        "cluster/parts",
        "rules/audit",
        "rules/run",
        "rules/tasks",
        "status/schema",
        *(f"{package}/events" for package in CORE_MAY_IMPORT),
    )
}
CORE_BANS = {
    "asyncio",
    "datetime",
    "io",
    "logging",
    "os",
    "pathlib",
    "random",
    "secrets",
    "selectors",
    "shutil",
    "signal",
}
CORE_BANS |= {"socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "uuid"}
CORE_THIRD_PARTY = {"msgpack", "numpy", "zstandard", "blake3", "xxhash"}
TORCH_FILES = (
    "echo2d/engines/torch_engine",
    "echo2d/engines/server/inside",
    "echo2d/engines/vllm/worker_extension",
    "echo2d/texts/reference.py",
    "echo2d/tinker/prompt_reader.py",
    "tools/gpu/",
    "tools/sglang_cpu/",
    "tools/vllm_cpu/",
    "tools/tokenizer_classes.py",
)
TORCH_AREAS = {"demo", "lab", "learner", "model_experts"}
LAB = REPO / "tools" / "lab" / "echo2d_lab"
# A key of a scorer is in the environment of its task process.
ENVIRONMENT_READERS = {
    "echo2d/process_environment.py",
    "echo2d/engines/server/inside/echo2d_memory.py",  # in the server's process
    "learner/config.py",
    "echo2d/tasks/scorers/remote.py",
}


def sources() -> Iterator[Path]:
    for folder in ("echo2d", "learner", "tools"):
        yield from sorted((REPO / folder).rglob("*.py"))


def area(path: Path) -> str:
    """The row of MAY_IMPORT for this file: of its room if there is one, else of its package or module."""
    if path.is_relative_to(LAB):
        return "lab"
    top, *parts = path.relative_to(REPO).with_suffix("").parts
    if top != "echo2d":
        return top
    room = ".".join(parts[:2])
    return room if room in MAY_IMPORT else parts[0]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = {f"{module}.{alias.name}" for alias in node.names}
            rooms = {name for name in names if name.removeprefix("echo2d.") in MAY_IMPORT}
            found = names if module == "echo2d" else rooms or {module}
            yield from ((node.lineno, name) for name in sorted(found))


def import_faults(path: str, here: str, tree: ast.AST) -> Iterator[str]:
    for line, name in imports(tree):
        where = f"{path}:{line}"
        top, _, target = name.partition(".")
        if not top:
            yield f"{where}: relative import"
        if here == "core" and top in CORE_BANS:
            yield f"{where}: core may not import {name}"
        if here == "core" and top not in sys.stdlib_module_names | CORE_THIRD_PARTY | {"echo2d"}:
            yield f"{where}: core takes no third-party {name}"
        if (
            top in {"torch", "transformers"}
            and not path.startswith(TORCH_FILES)
            and here not in TORCH_AREAS
        ):
            yield f"{where}: {here} may not import {top}"
        if top == "echo2d" and here != "lab":
            allowed = MAY_IMPORT[here] | {here, "__version__"}
            if not any(f"{target}.".startswith(f"{each}.") for each in allowed):
                yield f"{where}: {here} may not import echo2d.{target}"
        if top == "echo2d_lab" and here != "lab":
            yield f"{where}: {here} may not import {top}, which is not in the wheel"
        if top in {"tests", "tools"} and top != here:
            yield f"{where}: {here} may not import {top}"
        if top == "learner":
            yield f"{where}: {name} is echo2d.{name} in an installation; import it by that name"


def core_room(parts: Sequence[str]) -> str:
    """The room of a module, by its path below echo2d/core: its folder, or a room inside that."""
    inner = "/".join(parts[:2])
    return inner if inner in CORE_MAY_IMPORT else parts[0]


def core_faults(path: str, room: str, tree: ast.AST) -> Iterator[str]:
    """Walls inside the core: `room` is the folder below echo2d/core."""
    for line, name in imports(tree):
        top, core, *parts = (*name.split("."), "", "")
        if (top, core) != ("echo2d", "core"):
            continue
        target = core_room(parts)
        if target not in CORE_MAY_IMPORT[room] | {room, "base"}:
            yield f"{path}:{line}: core/{room} may not import core/{target}"


def learner_faults(path: str, room: str, tree: ast.AST) -> Iterator[str]:
    """Walls inside the learner: `room` is the folder below learner."""
    for line, name in imports(tree):
        top, package, target, *_ = (*name.split("."), "", "")
        if (top, package) == ("echo2d", "learner") and target not in LEARNER_MAY_IMPORT[room] | {
            room,
            "config",
        }:
            yield f"{path}:{line}: learner/{room} may not import learner/{target}"


def lab_faults(path: str, room: str, tree: ast.AST) -> Iterator[str]:
    """Walls inside tools/lab: `room` is the folder or module below echo2d_lab."""
    for line, name in imports(tree):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "echo2d_lab" and target not in LAB_MAY_IMPORT[room] | {room}:
            yield f"{path}:{line}: lab/{room} may not import lab/{target}"


def engine_faults(path: str, package: str, tree: ast.AST) -> Iterator[str]:
    """Walls between engines; `package` is the folder or module below echo2d/engines."""
    shared = {"base", "layout", "stream", "adapter", "server"}
    for line, name in imports(tree):
        parts = name.split(".")
        if parts[:2] == ["echo2d", "engines"] and parts[2] not in shared | {package}:
            yield f"{path}:{line}: engines/{package} may not import engines/{parts[2]}"


def call_faults(path: str, here: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        of_asyncio = isinstance(owner, ast.Name) and owner.id == "asyncio"
        if name == "create_task" and of_asyncio:
            yield f"{path}:{node.lineno}: bare create_task; use a TaskGroup"
        if (
            name == "print"
            and owner is None
            and here not in {"cli", "tools", "lab", "demo", "views", "learner"}
        ):
            yield f"{path}:{node.lineno}: print outside cli and tools"


def environment_faults(path: str, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in {"environ", "getenv"}
            and not path.startswith(("echo2d/demo", "tools/lab"))
        ):
            yield f"{path}:{node.lineno}: os.{node.attr} is read by process_environment.py alone"


def shared_test_faults(path: str, tree: ast.AST) -> Iterator[str]:
    """What several tests need lies in tests/support: a test file may change without regard to others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            last = module.rpartition(".")[2]
            if module.startswith("tests.") and last.startswith(("test_", "conftest")):
                yield f"{path}:{node.lineno}: imports {module}; move what it needs to tests/support"


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(REPO)))
def test_the_code_keeps_the_house_rules(path: Path) -> None:
    tree = ast.parse(path.read_text())
    name, here = str(path.relative_to(REPO)), area(path)
    faults = [*import_faults(name, here, tree), *call_faults(name, here, tree)]
    if here == "core" and path.stem != "__init__":
        faults += core_faults(name, core_room(Path(name).with_suffix("").parts[2:]), tree)
    if here == "learner" and len(path.parts) > len(REPO.parts) + 2:
        faults += learner_faults(name, path.parts[-2], tree)
    if here == "lab":
        faults += lab_faults(name, path.relative_to(LAB).with_suffix("").parts[0], tree)
    if here == "engines":
        faults += engine_faults(name, Path(name).with_suffix("").parts[2], tree)
    if name not in ENVIRONMENT_READERS:
        faults += environment_faults(name, tree)
    assert faults == []


def test_no_test_file_imports_another() -> None:
    faults = [
        fault
        for path in sorted((REPO / "tests").rglob("*.py"))
        for fault in shared_test_faults(str(path.relative_to(REPO)), ast.parse(path.read_text()))
    ]
    assert faults == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(p.relative_to(REPO))
        for p in sources()
        if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []


def test_every_core_module_has_a_test_file() -> None:
    core, tests = REPO / "echo2d" / "core", REPO / "tests" / "unit"
    modules = {
        path.relative_to(core).with_suffix("")
        for path in core.rglob("*.py")
        if path.stem != "__init__"
    }
    tested = {
        path.relative_to(tests / kind).with_name(path.stem.removeprefix("test_"))
        for kind in ("core", "property")
        for path in (tests / kind).rglob("test_*.py")
    }
    assert modules - tested - DECLARATIONS == set()


PLANTED = [
    ("core", "import time"),
    ("core", "from os import path"),
    ("core", "import aiohttp"),
    ("core", "from . import ids"),
    ("store", "from echo2d.net import api"),
    ("net.http", "import torch"),
    ("learner", "import echo2d.core.base.ids"),
    ("learner", "from echo2d import core"),
    ("learner", "from echo2d.config.worker import WorkerConfig"),
    ("client", "from echo2d.config.tables import Table"),
    ("client", "from echo2d.net.control.client import ControlLink"),
    ("client", "from echo2d.net import api"),
    ("net.api", "from echo2d.client import Coordinator"),
    ("net.control", "from echo2d.client.http import STATUS_PATH"),
    ("net.gateway", "from echo2d.net.api.routes import make_app"),
    ("tools", "import tests.support.full_disk"),
    ("cli", "import echo2d.core.base.ids"),
    ("learner", "from learner.config import LearnerConfig"),
    ("runtime", "from echo2d.learner.config import LearnerConfig"),
    ("runtime", "from echo2d_lab.standins.memory_run import MemoryRun"),
    ("tools", "from echo2d_lab.bench.lab.netlab import NetLab"),
]


PLANTED_IN_CORE = [
    ("broadcast", "from echo2d.core.work.training.groups import Groups"),
    ("work/training", "import echo2d.core.broadcast.publishing"),
    ("work/calls", "from echo2d.core.work.training.groups import Groups"),
    ("work", "from echo2d.core.work.evaluation.evaluations import Evaluations"),
    ("relay", "from echo2d.core.coordinator.state import CoordinatorState"),
    ("capacity", "from echo2d.core.cluster.membership import Peer"),
    ("base", "from echo2d.core.protocol import trajectory"),
]


@pytest.mark.parametrize(
    "line",
    [
        "from tests.e2e.test_by_hand import Site",
        "from tests.shells.net.security import test_tls_links",
        "import tests.unit.core.work.training.test_groups",
        "from tests.shells.sim.conftest import Play",
        "from tests.shells.sim import conftest",
    ],
)
def test_a_planted_import_of_a_test_file_is_found(line: str) -> None:
    assert list(shared_test_faults("tests/x.py", ast.parse(line)))


@pytest.mark.parametrize(("package", "line"), PLANTED_IN_CORE)
def test_a_planted_import_across_a_wall_is_found(package: str, line: str) -> None:
    assert list(core_faults("x.py", package, ast.parse(line)))


def test_a_planted_import_of_another_room_of_the_learner_is_found() -> None:
    line = ast.parse("from echo2d.learner.model.policy import Policy")
    assert list(learner_faults("x.py", "metrics", line))
    assert not list(learner_faults("x.py", "model", line))


def test_a_planted_import_of_another_room_of_the_lab_is_found() -> None:
    line = ast.parse("from echo2d_lab.bench.lab.netlab import NetLab")
    assert list(lab_faults("x.py", "faults", line))
    assert not list(lab_faults("x.py", "research", line))


def test_a_planted_import_of_another_engine_is_found() -> None:
    line = ast.parse("from echo2d.engines.sglang.client import SglangClient")
    assert list(engine_faults("x.py", "server", line))
    assert not list(engine_faults("x.py", "sglang", line))


def test_the_walls_have_no_cycle() -> None:
    """A room that is named in a row stands for its package, and a package for its rooms."""
    walls = {
        here: {
            row
            for row in MAY_IMPORT
            for each in allowed
            if row != here
            and (row == each or row.startswith(f"{each}.") or each.startswith(f"{row}."))
        }
        for here, allowed in MAY_IMPORT.items()
    }
    TopologicalSorter(walls).prepare()


def test_the_walls_of_the_core_have_no_cycle() -> None:
    core = REPO / "echo2d" / "core"
    assert {str(path.parent.relative_to(core)) for path in core.rglob("__init__.py")} - {
        "."
    } == set(CORE_MAY_IMPORT)
    TopologicalSorter(CORE_MAY_IMPORT).prepare()


@pytest.mark.parametrize(("here", "line"), PLANTED)
def test_a_planted_import_is_found(here: str, line: str) -> None:
    assert list(import_faults(f"{here}/x.py", here, ast.parse(line)))
