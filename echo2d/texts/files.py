"""The files of a model that make tokens of text and text of tokens."""

from pathlib import Path

from echo2d.errors import OperatorFault

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")


def read_text_files(directory: Path) -> dict[str, bytes]:
    """Those of TEXT_FILES that a model's directory has. Blocking.

    OperatorFault: one of them cannot be read.
    """
    found = [directory / name for name in TEXT_FILES if (directory / name).exists()]
    try:
        return {path.name: path.read_bytes() for path in found}
    except OSError as error:
        raise OperatorFault(f"cannot read {error.filename}: {error.strerror}") from error
