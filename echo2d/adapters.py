"""The pin of a LoRA adapter: a file in the adapter's directory that names the base model by a digest.

    adapter_config.json  adapter_model.safetensors     as Hugging Face PEFT writes them
    base.json            {"base_digest": "..."}         the pin: 64 hex digits

Every program that loads an adapter compares the pin with its base model. The pin is a file of the snapshot like all
others, so the digest of a snapshot covers the base, too. The base itself is never published: the learner and every
worker have a copy. All functions block.
"""

import json
import re
from pathlib import Path

from blake3 import blake3

from echo2d.core.weights.manifest import ADAPTER_CONFIG, BASE_PIN
from echo2d.errors import OperatorFault, path_fault
from echo2d.model_files import weight_files

# These files hold the architecture and the end tokens, so they are part of the base digest.
_SHAPING = ("config.json", "generation_config.json")
_DIGEST = re.compile("[0-9a-f]{64}")


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds a LoRA adapter, and not a whole model."""
    return (directory / ADAPTER_CONFIG).exists()


def base_files(directory: Path) -> list[Path]:
    """The files of a model directory that determine its outputs: weights, index, configuration.

    Symbolic links are followed. OperatorFault: the directory holds no model, or it holds an adapter.
    """
    if is_adapter(directory):
        raise OperatorFault(
            f"base model {directory} holds an {ADAPTER_CONFIG}: an adapter needs a whole model"
        )
    files = weight_files(directory)
    weights = [*files.read, *([] if files.index is None else [files.index])]
    shaping = [directory / name for name in _SHAPING if (directory / name).exists()]
    if not weights or directory / "config.json" not in shaping:
        raise OperatorFault(f"base model {directory} has no config.json, or no .safetensors file")
    return sorted(weights + shaping)


def base_digest(directory: Path) -> str:
    """The digest of a base model, in hex. The function reads all of the model's files.

    The digest is the blake3-256 of what `b3sum` prints for the `base_files`, in byte order of their names, so that a
    person can check it by hand. OperatorFault: as in `base_files`, or a file cannot be read.
    """
    try:
        listing = "".join(
            f"{_content_digest(path)}  {path.name}\n" for path in base_files(directory)
        )
    except OSError as error:
        raise path_fault(f"base model {directory} cannot be read", error) from error
    return blake3(listing.encode()).hexdigest()


def pin_base(adapter: Path, digest: str) -> None:
    """Write the pin of an adapter. digest: the `base_digest` of its base model."""
    (adapter / BASE_PIN).write_bytes(base_pin(digest))


def base_pin(digest: str) -> bytes:
    """The content of the file BASE_PIN."""
    return (json.dumps({"base_digest": digest}) + "\n").encode()


def pinned_base(directory: Path) -> str | None:
    """The `base_digest` in the pin of an adapter; None: `directory` holds a whole model.

    OperatorFault: the adapter has no valid pin.
    """
    if not is_adapter(directory):
        return None
    path = directory / BASE_PIN
    try:
        with path.open("rb") as file:
            # A valid pin has a digest and its key: fewer than 256 bytes, even with much white space.
            digest = json.loads(file.read(256))["base_digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OperatorFault(f"{path} does not name the adapter's base model: {error}") from error
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise OperatorFault(f"{path}: base_digest: expected 64 hex digits; found {digest!r}")
    return digest


def _content_digest(path: Path) -> str:
    digest = blake3()
    with path.open("rb") as file:
        # At most 8 MiB are in memory at a time.
        while part := file.read(8 << 20):
            digest.update(part)
    return digest.hexdigest()
