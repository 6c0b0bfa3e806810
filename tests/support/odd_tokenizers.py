"""Tokenizer folders with every oddity that folders in use have, drawn by a seed; and conversations for them.

Each folder is a base, which is a tokenizer as one family of models has it, and one or two oddities: files and settings
that other programs leave in such a folder.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Sequence, Split
from tokenizers.trainers import BpeTrainer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALL_NAMES = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ image_token }}|{{ sep_token }}|"
    "{% if tools is none and documents is none %}none{% else %}{{ tools | tojson }}{% endif %}"
)
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
JSON = (
    "{% for message in messages %}{{ message | tojson(ensure_ascii=true) }}{{ message | tojson(indent=2) }}"
    "{{ message | tojson(sort_keys=true, separators=(',', ':')) }}{% endfor %}"
)
LOOPS = (
    "{%- set ns = namespace(n=0) %}{%- for message in messages %}{%- if message.content is none %}{% continue %}"
    "{%- endif %}{%- set ns.n = ns.n + 1 %}[{{ ns.n }}:{{ message.role | upper }}] {{ message.content | trim }}\n"
    "{%- endfor %}{{ dict(a=1).items() | list }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
)
TEMPLATES = (CHATML, CHATML + ALL_NAMES, GENERATION, JSON, LOOPS)

_TEXT = [
    "Question: what is the sum of 17 and 25? Answer: the sum is 42.",
    "The quick brown fox jumps over the lazy dog, didn't it? It's 3.14159!",
    "def add(a, b):\n    return a + b\n\n\n# größer als 10 €, naïve café, 你好世界 и привет",
    "user assistant system tool a long question number 7, once   upon a time\t\ttabs",
]


def conversations(rng: random.Random) -> list[list[dict[str, Any]]]:
    """Twelve different conversations."""
    words = [
        "what",
        "is",
        "17",
        "+",
        "25",
        "größer",
        "你好",
        "\n\n",
        "  ",
        "didn't",
        "<b>",
        "{x}",
        "naïve",
    ]

    def text(most: int = 20) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, most)))

    found: list[list[dict[str, Any]]] = []
    for number in range(12):
        messages: list[dict[str, Any]] = []
        if number % 3 == 1:
            messages.append({"role": "system", "content": text()})
        for turn in range(1 + number % 4):
            if turn:
                messages.append({"role": "assistant", "content": text()})
            messages.append({"role": "user", "content": text(80 if number == 5 else 20)})
        if number == 7:
            messages[0]["content"] = f" \n{text()}\n "
        if number == 8:
            call = {"type": "function", "function": {"name": "look", "arguments": {"at": text(3)}}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "content": text()})
        if number == 9:
            messages.append({"role": "assistant", "content": text(), "reasoning": text()})
            messages.append({"role": "user", "content": text()})
        found.append(messages)
    return found


def byte_level(*, regex: bool, ignore_merges: bool = False, nfc: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split: Any = ByteLevel(add_prefix_space=False)
    if regex:
        pattern = Regex(
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        split = Sequence(
            [Split(pattern, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    elif nfc:
        split = Sequence([Digits(individual_digits=True), split])
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    trainer = BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=ByteLevel.alphabet())
    made.train_from_iterator(_TEXT * 3, trainer)
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in CONTROL])
    return made


def metaspace(*, file_normalizes: bool) -> Tokenizer:
    """A tokenizer like those of Llama 2 and Gemma: with a normalizer, as in old files, or with a pre-tokenizer."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    alphabet = sorted({*"".join(_TEXT).replace(" ", "▁")} - {"\n", "\t"})
    trainer = BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=alphabet,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{each:02X}>" for each in range(256))],
    )  # fmt: skip
    made.pre_tokenizer = Metaspace(replacement="▁", prepend_scheme="first", split=True)
    made.train_from_iterator(_TEXT * 3, trainer)
    if file_normalizes:
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        made.pre_tokenizer = Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in CONTROL])
    return made


_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# The tokenizer, its class, the model's type, and its named tokens.
BASES: dict[str, tuple[Callable[[], Tokenizer], str, str, dict[str, str]]] = {
    "smollm": (
        lambda: byte_level(regex=False, nfc=True), "GPT2Tokenizer", "llama",
        {"bos_token": "<|im_start|>", **_QWEN},
    ),
    "qwen2": (lambda: byte_level(regex=True, nfc=True), "Qwen2Tokenizer", "qwen2", _QWEN),
    "qwen3": (lambda: byte_level(regex=True), "Qwen2TokenizerFast", "qwen3", _QWEN),
    "llama3": (
        lambda: byte_level(regex=True, ignore_merges=True), "PreTrainedTokenizerFast", "llama",
        {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    ),
    "llama_bytes": (lambda: byte_level(regex=True), "LlamaTokenizerFast", "llama", _QWEN),
    "llama2": (lambda: metaspace(file_normalizes=False), "LlamaTokenizer", "llama", _LLAMA),
    "llama2_old": (lambda: metaspace(file_normalizes=True), "LlamaTokenizerFast", "llama", _LLAMA),
    "neox": (lambda: byte_level(regex=False), "GPTNeoXTokenizerFast", "gpt_neox", {"eos_token": "<|endoftext|>"}),
    "unnamed": (lambda: byte_level(regex=False), "", "opt", {}),
    "plain": (lambda: byte_level(regex=False), "TokenizersBackend", "granite", _QWEN),
}  # fmt: skip


class Folder:
    """A folder before it is written: each file as an object, or as text."""

    def __init__(self, base: str, rng: random.Random) -> None:
        make, cls, model, named = BASES[base]
        self.rng = rng
        self.tokenizer: dict[str, Any] = json.loads(make().to_str())
        self.settings: dict[str, Any] = {"chat_template": CHATML, **named}
        if cls:
            self.settings["tokenizer_class"] = cls
        self.config: dict[str, Any] = {"model_type": model, "vocab_size": 512}
        self.others: dict[str, Any] = {}

    def write(self, directory: Path) -> None:
        files = {
            "tokenizer.json": self.tokenizer,
            "tokenizer_config.json": self.settings,
            "config.json": self.config,
            **self.others,
        }
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def _truncation(folder: Folder) -> None:
    folder.tokenizer["truncation"] = {
        "direction": folder.rng.choice(["Right", "Left"]), "max_length": 8, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip


def _padding(folder: Folder) -> None:
    token = folder.rng.choice(["<|endoftext|>", "<pad>"])
    folder.tokenizer["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": token,
    }  # fmt: skip


def _special_map(folder: Folder) -> None:
    """Only special_tokens_map.json has the special tokens, as text or with their properties."""
    named = {
        key: folder.settings.pop(key) for key in list(folder.settings) if key.endswith("_token")
    }
    named.setdefault("bos_token", "<|im_start|>")
    if folder.rng.random() < 0.5:
        flags = {
            "lstrip": False,
            "rstrip": folder.rng.random() < 0.3,
            "normalized": False,
            "single_word": False,
        }
        named = {key: {"content": value, **flags} for key, value in named.items()}
    named["additional_special_tokens"] = ["<|im_start|>", "<|extra_0|>"]
    folder.others["special_tokens_map.json"] = named


def _no_settings(folder: Folder) -> None:
    """There is no tokenizer_config.json, as with some trainers, and the template has a file of its own."""
    folder.others["chat_template.jinja"] = folder.settings.get("chat_template", CHATML)
    named = {key: value for key, value in folder.settings.items() if key.endswith("_token")}
    folder.others.setdefault("special_tokens_map.json", {**named, "unk_token": "<|endoftext|>"})
    folder.settings = {}


def _added_decoder(folder: Folder) -> None:
    """tokenizer_config.json lists added tokens, one of which tokenizer.json lacks."""
    listed = {
        str(each["id"]): {k: v for k, v in each.items() if k != "id"}
        for each in folder.tokenizer["added_tokens"]
    }
    new = 10 + max(map(int, listed), default=500)
    flags = {
        "lstrip": False,
        "rstrip": False,
        "normalized": folder.rng.random() < 0.5,
        "single_word": False,
    }
    listed[str(new)] = {"content": "question", "special": folder.rng.random() < 0.5, **flags}
    folder.settings["added_tokens_decoder"] = listed


def _added_file(folder: Folder) -> None:
    folder.others["added_tokens.json"] = {
        "naïve": 700,
        "<think>": 701,
        **({"<|im_end|>": 2} if folder.rng.random() < 0.3 else {}),
    }


def _extra(folder: Folder) -> None:
    if folder.rng.random() < 0.5:
        folder.settings["extra_special_tokens"] = {
            "image_token": "<image>",
            "bos_token_2": "<|im_start|>",
        }
    else:
        folder.settings["additional_special_tokens"] = ["<|im_start|>", "<|extra_1|>", "what"]


def _own_token(folder: Folder) -> None:
    folder.settings["image_token"] = "<image>"
    folder.settings["chat_template"] = CHATML + ALL_NAMES


def _token_objects(folder: Folder) -> None:
    for key in ("bos_token", "eos_token", "unk_token"):
        folder.settings[key] = {
            "__type": "AddedToken", "content": "<|endoftext|>", "lstrip": folder.rng.random() < 0.3, "rstrip": False,
            "normalized": False, "single_word": False, "special": True,
        }  # fmt: skip


def _missing_token(folder: Folder) -> None:
    folder.settings[folder.rng.choice(["bos_token", "pad_token", "unk_token"])] = "<not there>"


def _adds(folder: Folder) -> None:
    folder.settings.update(
        add_bos_token=folder.rng.random() < 0.5, add_eos_token=folder.rng.random() < 0.5
    )


def _prefix_space(folder: Folder) -> None:
    folder.settings["add_prefix_space"] = folder.rng.random() < 0.7
    if folder.rng.random() < 0.5:
        folder.settings["legacy"] = folder.rng.random() < 0.5


def _split_special(folder: Folder) -> None:
    folder.settings["split_special_tokens"] = True


def _template(folder: Folder) -> None:
    folder.settings["chat_template"] = folder.rng.choice(TEMPLATES)


def _template_file(folder: Folder) -> None:
    folder.others["chat_template.jinja"] = folder.rng.choice(TEMPLATES)


def _templates(folder: Folder) -> None:
    named = {"default": CHATML, "tool_use": CHATML + ALL_NAMES, "rag": LOOPS}
    if folder.rng.random() < 0.5:
        folder.settings["chat_template"] = [
            {"name": name, "template": each} for name, each in named.items()
        ]
    else:
        folder.others["chat_template.jinja"] = CHATML
        folder.others["additional_chat_templates/tool_use.jinja"] = CHATML + ALL_NAMES


def _other_class(folder: Folder) -> None:
    folder.settings["tokenizer_class"] = folder.rng.choice(
        [
            "PreTrainedTokenizerFast",
            "LlamaTokenizer",
            "Qwen2Tokenizer",
            "GPT2TokenizerFast",
            "TokenizersBackend",
            "GemmaTokenizer",
            "CohereTokenizerFast",
            "NobodysTokenizer",
        ]
    )


def _other_model(folder: Folder) -> None:
    folder.config["model_type"] = folder.rng.choice(
        ["llama", "qwen2", "qwen3", "gpt2", "mistral", "gemma2", "phi3", "olmo2"]
    )


def _no_post_processor(folder: Folder) -> None:
    folder.tokenizer["post_processor"] = None


def _strips(folder: Folder) -> None:
    """Added tokens that swallow the spaces beside them."""
    for each in folder.tokenizer["added_tokens"]:
        if each["content"] in CONTROL:
            each["lstrip"], each["rstrip"] = folder.rng.random() < 0.5, folder.rng.random() < 0.5


ODDITIES: tuple[Callable[[Folder], None], ...] = (
    _truncation, _padding, _special_map, _no_settings, _added_decoder, _added_file, _extra, _own_token, _token_objects,
    _missing_token, _adds, _prefix_space, _split_special, _template, _template_file, _templates, _other_class,
    _other_model, _no_post_processor, _strips,
)  # fmt: skip


def draw(seed: int, directory: Path) -> tuple[str, list[str]]:
    """Write a folder. Returns its base and its oddities. The first seeds give each oddity alone."""
    rng = random.Random(seed)
    bases = list(BASES)
    if seed < len(ODDITIES):
        base, odd = rng.choice(bases), [ODDITIES[seed]]
    else:
        base, odd = bases[seed % len(bases)], rng.sample(ODDITIES, 2)
    folder = Folder(base, rng)
    for each in odd:
        each(folder)
    folder.write(directory)
    return base, [each.__name__.strip("_") for each in odd]
