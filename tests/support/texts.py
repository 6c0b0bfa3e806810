"""A tokenizer whose tokens are bytes, as the files of a snapshot."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo2d.texts.model_texts import ModelTexts


def bytes_tokenizer() -> Tokenizer:
    """A token per byte: characters come in halves."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def texts(template: str | None = None, **config: Any) -> ModelTexts:
    files = {
        "tokenizer.json": bytes_tokenizer().to_str().encode(),
        "config.json": json.dumps(config).encode(),
    }
    settings = {"chat_template": template, "bos_token": {"content": "<s>"}}
    return ModelTexts({**files, "tokenizer_config.json": json.dumps(settings).encode()})


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if shout %}!{% endif %}<answer>"
)


def write_text_model(directory: Path, template: str | None = TEMPLATE) -> Path:
    """A directory with the files of a model that make tokens of text."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(bytes_tokenizer().to_str())
    settings = {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
