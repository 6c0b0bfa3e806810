"""The files of a model that make tokens of text and text of tokens."""

from pathlib import Path

from blake3 import blake3

from echo2d.errors import path_fault

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")


# They decide which tokens a text has.
TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_text_files(directory: Path) -> dict[str, bytes]:
    """Those of TEXT_FILES that a model's directory has. Blocking.

    OperatorFault: one of them cannot be read.
    """
    found = [directory / name for name in TEXT_FILES if (directory / name).exists()]
    try:
        return {path.name: path.read_bytes() for path in found}
    except OSError as error:
        raise path_fault(f"cannot read {error.filename}", error) from error


def text_digest(directory: Path) -> bytes:
    """blake3-256 of those of TOKEN_FILES that a model's directory has, with their names. Blocking.

    OperatorFault: one of them cannot be read.
    """
    files = read_text_files(directory)
    told = blake3()
    for name in TOKEN_FILES:
        if name in files:
            told.update(b"%s %d " % (name.encode(), len(files[name])) + files[name])
    return told.digest()
