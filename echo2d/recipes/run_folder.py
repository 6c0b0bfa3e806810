"""The folder that `echo2d init` writes: config, the run's directory, and a token file for each box.

    FOLDER/  run.toml   coordinator/ (the run: key, tokens)   snapshots/   box-1.token, box-2.token, ...

Everything exists before the first program starts, so the operator types no token's URL, and may start the
programs in any order.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from echo2d.config.coordinator import is_local
from echo2d.errors import OperatorFault, path_fault
from echo2d.net.security.urls import WILDCARDS, coordinator_url
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.runtime.run_dir.tokens import create_token, own_token

CONFIG_FILE = "run.toml"
RUN_DIR = "coordinator"
_BOXES_MAX = 1000  # twice the largest fleet; `echo2d token create` makes more tokens
EXPIRES = "30d"  # a box that joins in this time stays a member


@dataclass(frozen=True, slots=True)
class Boxes:
    """How many machines may join. one_token: all join with the same token file; otherwise each gets its own."""

    count: int = 1
    one_token: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _BOXES_MAX:
            raise OperatorFault(f"--boxes: expected 1 to {_BOXES_MAX}; found {self.count}")


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """What `echo2d init` has written. boxes: token files of the boxes. agents: token file of the agents, if any."""

    config: Path
    url: str
    task: str
    boxes: tuple[Path, ...]
    agents: Path | None = None

    @property
    def run_dir(self) -> Path:
        return self.config.parent / RUN_DIR

    @property
    def local(self) -> bool:
        """Whether only this host reaches the coordinator."""
        return is_local(urlsplit(self.url).hostname or "")


def url_of(host: str, port: int) -> str:
    """The URL at which workers and the learner reach the coordinator; it uses TLS except on loopback.

    OperatorFault: the text is no address of a host.
    """
    if host and host in WILDCARDS:
        raise OperatorFault(
            f"--host: expected the address at which the boxes reach this host; found {host!r}, which means "
            "every address"
        )
    if "[" in host or "%" in host:
        raise OperatorFault(
            f"--host: expected an address without brackets and zone; found {host!r}"
        )
    named = f"[{host}]" if ":" in host else host
    try:
        return coordinator_url(f"{'http' if is_local(host) else 'https'}://{named}:{port}")
    except OperatorFault as fault:
        raise OperatorFault(f"--host: expected an address or a name; found {host!r}") from fault


def require_new(folder: Path) -> None:
    """OperatorFault: the folder already has a config or a run."""
    for name in (CONFIG_FILE, RUN_DIR):
        if (folder / name).exists():
            raise OperatorFault(f"{folder / name} exists already; choose another --out")


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[None]:
    """If the block fails, remove what it has written into the folder."""
    before = set(folder.iterdir()) if folder.exists() else None
    try:
        yield
    except BaseException:
        for path in set(folder.glob("*")) - (before or set()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if before is None and folder.exists():
            folder.rmdir()
        raise


def write_folder(folder: Path, config: str, *, copies: Mapping[str, Path] | None = None) -> Path:
    """Write the config, and copies of directories under these names. Returns the config's path.

    OperatorFault: the folder cannot be written.
    """
    path = folder / CONFIG_FILE
    try:
        (folder / "snapshots").mkdir(parents=True, exist_ok=True)
        for name, source in (copies or {}).items():
            shutil.copytree(source, folder / name, dirs_exist_ok=True)
        path.write_text(config, encoding="utf-8")
    except OSError as error:
        raise path_fault(f"--out: cannot write {path}", error) from error
    return path


def issue_tokens(folder: Path, url: str, boxes: Boxes) -> tuple[Path, ...]:
    """Make the run's directory and the token files of the boxes. Returns these files.

    The learner's own token is made, too, so that the learner may start before the coordinator.
    """
    run = RunDirectory(folder / RUN_DIR)
    own_token(run, AccessTable(run), "learner", url)
    if boxes.one_token:
        return (_issue(folder, url, "boxes", "worker", boxes.count),)
    return tuple(_issue(folder, url, f"box-{n}", "worker") for n in range(1, boxes.count + 1))


def issue_agent_token(folder: Path, url: str) -> Path:
    """Make the token file with which outside agents play."""
    return _issue(folder, url, "agent", "agent")


def _issue(folder: Path, url: str, name: str, role: str, machines: int = 1) -> Path:
    out = folder / f"{name}.token"
    create_token(
        folder / RUN_DIR, name, role=role, url=url, out=out, max_workers=machines, expires=EXPIRES
    )
    return out
