"""Makes the wheel that a new box installs, from the files of this installation.

A wheel is a zip file of the package and its metadata. This also works from an editable installation, such
as a checkout, where the learner is in another folder than the rest of echo2d.
"""

import asyncio
import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import sysconfig
import zipfile
from pathlib import Path

from echo2d.errors import OperatorFault
from echo2d.this_build import BUILD_FILE, THIS_BUILD

PACKAGE = Path(__file__).parents[2]
# Kinds of files that belong to the package. People keep other files beside them: tokens, settings, copies.
_SUFFIXES = {
    ".c",
    ".css",
    ".h",
    ".html",
    ".js",
    ".py",
    ".proto",
    ".pyi",
    ".sh",
    ".so",
    ".svg",
    ".toml",
    ".typed",
}
# A date that zip files can hold, so that the same files make the same wheel.
DATE = (2020, 1, 1, 0, 0, 0)


class GivenWheel:
    """The wheel, made at the first call and kept, even if that caller does not wait for it."""

    def __init__(self) -> None:
        self._made: asyncio.Future[tuple[str, bytes]] | None = None

    async def get(self) -> tuple[str, bytes]:
        """The wheel's file name and bytes. OperatorFault: there is no wheel."""
        made = self._made
        if made is None or (made.done() and made.exception() is not None):
            made = asyncio.get_running_loop().run_in_executor(None, installed_wheel)
            self._made = made
        return await asyncio.shield(made)


def installed_wheel() -> tuple[str, bytes]:
    """The wheel's file name and bytes. Blocking. OperatorFault: this copy was never installed."""
    try:
        distribution = importlib.metadata.distribution("echo2d")
    except importlib.metadata.PackageNotFoundError as error:
        raise OperatorFault("echo2d is not installed here: there is no wheel to give") from error
    about = f"echo2d-{distribution.version}"
    tag = _tag()
    found = [*_files(PACKAGE), *_files(_learner(), "learner/")]
    files = {f"echo2d/{name}": path.read_bytes() for name, path in found}
    runs = {f"echo2d/{name}" for name, path in found if path.stat().st_mode & 0o100}
    files[f"echo2d/{BUILD_FILE}"] = THIS_BUILD.name.encode()
    files[f"{about}.dist-info/METADATA"] = _metadata(distribution).encode()
    commands = distribution.read_text("entry_points.txt") or ""
    files[f"{about}.dist-info/entry_points.txt"] = commands.encode()
    files[f"{about}.dist-info/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: echo2d\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    )
    record = f"{about}.dist-info/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name in runs else 0o644) << 16
            wheel.writestr(entry, data)
    return f"{about}-{tag}.whl", packed.getvalue()


def _metadata(distribution: importlib.metadata.Distribution) -> str:
    """The metadata. `python -m echo2d` in a checkout finds the build's egg-info, where the file is called PKG-INFO."""
    for name in ("METADATA", "PKG-INFO"):
        if text := distribution.read_text(name):
            return text
    raise OperatorFault("the installation of echo2d is damaged: its metadata are gone")


def _learner() -> Path:
    """The learner's folder. OperatorFault: the installation lacks the learner."""
    spec = importlib.util.find_spec("echo2d.learner")
    if spec is None or spec.origin is None:
        raise OperatorFault("the installation of echo2d is damaged: it has no learner")
    return Path(spec.origin).parent


def _files(folder: Path, prefix: str = "") -> list[tuple[str, Path]]:
    """The files of a folder, with their names in the package. No link is followed."""
    found: list[tuple[str, Path]] = []
    for path in sorted(folder.iterdir()):
        name = prefix + path.name
        # A box needs none of the shared files, and in a checkout people keep their own files there.
        # The learner is added from its own folder.
        if (
            path.name in {"__pycache__", "share", "learner"}
            or path.name.startswith(".")
            or path.is_symlink()
        ):
            continue
        if path.is_dir():
            found += _files(path, f"{name}/")
        # Other JSON files beside the code may be a person's own.
        elif path.suffix in _SUFFIXES or path.name == "tokenizer_classes.json":
            found.append((name, path))
    return found


def _tag() -> str:
    """The wheel's tag: the compiled loops use Python's stable ABI; without them the wheel fits every machine."""
    if not any((PACKAGE / "native").glob("_words*.so")):
        return "py3-none-any"
    return f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
