"""Which base model a LoRA adapter belongs to: said by the adapter's own directory, compared wherever it is loaded.

    adapter_config.json  adapter_model.safetensors     as Hugging Face PEFT writes them
    base.json            {"base_digest": "..."}         64 hex digits, of the base model

The pin is a file of the snapshot like all others, so a snapshot digest names the base as well. The base itself is never
published: it lies where the learner and the workers have it. Blocking functions.
"""

import json
import re
from pathlib import Path

from blake3 import blake3

from echo2d.core.weights.manifest import ADAPTER_CONFIG, BASE_PIN
from echo2d.errors import OperatorFault

READ_BYTES = 8 << 20  # in memory at a time
PIN_BYTES_MAX = 256  # a digest and its key, generously spaced

_SHAPING = ("config.json", "generation_config.json")  # architecture; end tokens
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_DIGEST = re.compile("[0-9a-f]{64}")


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).exists()


def base_files(directory: Path) -> list[Path]:
    """What shapes the numbers of a model directory: its weights, their index, its configuration. Links are followed.

    OperatorFault: it is no model directory, or it is an adapter itself.
    """
    if is_adapter(directory):
        raise OperatorFault(
            f"base model {directory} holds an {ADAPTER_CONFIG}: an adapter needs a whole model"
        )
    try:
        weights = [path for path in directory.iterdir() if path.name.endswith(_WEIGHTS)]
    except OSError as error:
        raise OperatorFault(f"base model {directory} cannot be read: {error.strerror}") from error
    shaping = [directory / name for name in _SHAPING if (directory / name).exists()]
    if not weights or directory / "config.json" not in shaping:
        raise OperatorFault(f"base model {directory} has no config.json, or no .safetensors file")
    return sorted(weights + shaping)


def base_digest(directory: Path) -> str:
    """blake3-256, in hex, of what `b3sum` says of the `base_files`, in byte order of their names; reads them all."""
    try:
        listing = "".join(
            f"{_content_digest(path)}  {path.name}\n" for path in base_files(directory)
        )
    except OSError as error:
        raise OperatorFault(f"base model {directory} cannot be read: {error.strerror}") from error
    return blake3(listing.encode()).hexdigest()


def pin_base(adapter: Path, digest: str) -> None:
    """Have the adapter in this directory say that it belongs to the base model with this `base_digest`."""
    (adapter / BASE_PIN).write_text(json.dumps({"base_digest": digest}) + "\n")


def pinned_base(directory: Path) -> str | None:
    """The `base_digest` of the model that the adapter in `directory` belongs to; None: it is a whole model.

    OperatorFault: an adapter that does not say.
    """
    if not is_adapter(directory):
        return None
    path = directory / BASE_PIN
    try:
        with path.open("rb") as file:
            digest = json.loads(file.read(PIN_BYTES_MAX))["base_digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorFault(f"{path} does not tell the adapter's base model: {error}") from error
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise OperatorFault(f"{path}: base_digest is no digest of 64 hex digits")
    return digest


def _content_digest(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
