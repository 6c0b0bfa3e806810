"""A tokenizer whose tokens are bytes, as the files of a snapshot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo2d.texts.model_texts import ModelTexts


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer with a token per byte, so that a character may be split over two deltas."""
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


# The template of `chat_texts`. It supports tools as Qwen's and Hermes' templates do.
CHATML = (
    "{% if tools %}<|im_start|>system\n<tool_call>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# It drops the reasoning of earlier answers, as Qwen3's template does.
DROPS = CHATML.replace("\n{{ m.content }}{%", "\n{{ m.content.split('</think>')[-1].lstrip() }}{%")


WORDS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "</think>",
    "<think>",
)


def chat_tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    """Bytes, the merge of "1" and "1" to "11", and the tokens of Qwen's chat format."""
    document = json.loads(bytes_tokenizer().to_str())
    document["model"]["vocab"]["11"] = len(document["model"]["vocab"])
    document["model"]["merges"] = [["1", "1"]]
    made = Tokenizer.from_str(json.dumps(document))
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens(list(words))
    return made


def chat_texts(template: str = CHATML) -> ModelTexts:
    return ModelTexts({"tokenizer.json": chat_tokenizer().to_str().encode()}, template)


def write_chat_model(directory: Path, template: str = CHATML) -> Path:
    """A directory with the files of such a model."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(chat_tokenizer().to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


EMPTY_WEIGHTS = b"\2\0\0\0\0\0\0\0{}"  # a safetensors file without tensors


def write_text_model(directory: Path, template: str | None = TEMPLATE) -> Path:
    """A directory with those files of a model that turn text into tokens."""
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(bytes_tokenizer().to_str())
    settings = {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
