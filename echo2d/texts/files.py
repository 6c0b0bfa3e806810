"""The files of a model that decide how text becomes tokens and tokens become text."""

import json
from pathlib import Path

from blake3 import blake3

from echo2d.errors import OperatorFault, path_fault

TOKENIZER, SETTINGS, CLASS_FILE = "tokenizer.json", "tokenizer_config.json", "config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
# These files decide which tokens a text has.
TOKEN_FILES = (TOKENIZER, SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS, TEMPLATE, TOOL_TEMPLATE)
TEXT_FILES = (*TOKEN_FILES, CLASS_FILE)


def read_text_files(directory: Path) -> dict[str, bytes]:
    """Read the files of TEXT_FILES that a model's directory has. Blocking.

    OperatorFault: one of them cannot be read.
    """
    found = [name for name in TEXT_FILES if (directory / name).exists()]
    try:
        return {name: (directory / name).read_bytes() for name in found}
    except OSError as error:
        raise path_fault(f"cannot read {error.filename}", error) from error


def token_files(directory: Path) -> dict[str, bytes]:
    """All that decides which tokens a text has: the files of TOKEN_FILES that a model's directory has, and the
    keys of its config.json that name the tokenizer's class. Blocking.

    OperatorFault: one of them cannot be read.
    """
    files = read_text_files(directory)
    found = {name: files[name] for name in TOKEN_FILES if name in files}
    if CLASS_FILE in files:
        try:
            config = json.loads(files[CLASS_FILE])
        except ValueError as error:
            raise OperatorFault(f"{directory / CLASS_FILE} holds no JSON: {error}") from error
        # These keys name the tokenizer's class if tokenizer_config.json names none.
        named = {
            key: config[key]
            for key in ("model_name", "model_type", "tokenizer_class")
            if key in config
        }
        found[CLASS_FILE] = json.dumps(named, sort_keys=True).encode()
    return found


def text_digest(directory: Path) -> bytes:
    """blake3-256 of `token_files`, with their names. Blocking. OperatorFault: one of them cannot be read."""
    digest = blake3()
    for name, content in token_files(directory).items():
        digest.update(b"%s %d " % (name.encode(), len(content)) + content)
    return digest.digest()
