"""Compares the prompts of this program with those that `transformers`, if installed, makes from the same directory.

Blocking, and it imports `transformers`, which takes seconds.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from echo2d.texts.files import read_text_files
from echo2d.texts.model_texts import ModelTexts, UnusableText

_SHOWN = 60  # characters or tokens of a difference
_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "What is 17 + 25?  Größer als 10 €, 你好\n\nIt's 3.14."}],
    [
        {"role": "system", "content": "A rule."},
        {"role": "user", "content": " Once.\n"},
        {"role": "assistant", "content": "Twice."},
        {"role": "user", "content": "def add(a, b):\n    return a + b"},
    ],
)


def difference(directory: Path) -> str | None:
    """Describe the difference; empty: none. None: `transformers` is not installed, or cannot read the directory.

    OperatorFault: this program cannot read it.
    """
    ours = ModelTexts(read_text_files(directory))
    if find_spec("transformers") is None:
        return None
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    # `transformers` may raise any exception on a directory.
    except Exception:  # noqa: BLE001
        return None
    for messages in _CONVERSATIONS:
        if found := _difference(ours, theirs, messages):
            return found
    return ""


def _difference(ours: ModelTexts, theirs: Any, messages: list[dict[str, Any]]) -> str:
    try:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # noqa: BLE001 - the template is a foreign program
        return ""
    try:
        text = ours.render(messages, {})
    except UnusableText as fault:
        return f"transformers renders a prompt where {fault.detail}"
    if text != expected:
        return f"a prompt begins {text[:_SHOWN]!r}; transformers begins it {expected[:_SHOWN]!r}"
    tokens = ours.encode(text, special=False)
    ids = theirs.encode(text, add_special_tokens=False)
    if tokens != ids:
        return f"a prompt has the tokens {tokens[:_SHOWN]}; with transformers it has {ids[:_SHOWN]}"
    return ""
