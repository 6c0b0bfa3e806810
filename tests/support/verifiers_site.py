"""A run for agents' frameworks: a model with Qwen3's chat format, and tokens for its gateway.

ECHO2D_VERIFIERS names the interpreters that have `verifiers`, separated by ":"; `make nightly-envs`
installs them.
"""

import json
import os
from pathlib import Path
from typing import get_args
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2d.net.security.auth import TokenRole
from echo2d.runtime.run_dir.tokens import create_token
from tests.support.paths import REPO
from tests.support.polling import poll
from tests.support.programs import Site
from tests.support.texts import WORDS, chat_tokenizer

INTERPRETERS = [name for name in os.environ.get("ECHO2D_VERIFIERS", "").split(":") if name]
# The version of `renderers` that classic environments need, in a folder of its own.
CLASSIC_RENDERERS = Path(
    os.environ.get("ECHO2D_CLASSIC_RENDERERS", REPO / ".cache" / "envs" / "renderers-0.1.10")
)
EPISODES = int(os.environ.get("ECHO2D_EPISODES", "200"))


def write_chat_model(directory: Path) -> Path:
    """A tiny model with random weights, whose tokenizer has the tokens of Qwen3's chat format.

    It has none for "<think>", because an answer that begins with that token and ends is never extended.
    """
    made = chat_tokenizer([word for word in WORDS if word != "<think>"])
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=made.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=4096,
    )  # fmt: skip
    policy = Qwen3ForCausalLM(config).to(torch.bfloat16)
    # As with chat models, the renderer ends answers at these tokens.
    ends = [made.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    policy.generation_config.eos_token_id = ends
    policy.save_pretrained(directory)
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def gateway_token(site: Site, role: TokenRole) -> Path:
    """A new token file, which the coordinator knows."""
    assert role in get_args(TokenRole)
    out = site.directory / "app.token"
    create_token(
        site.run_dir, "app", role=role, url=site.url(), out=out, max_workers=None, expires="1d"
    )
    secret = secret_in(out)
    poll(lambda: _is_known(site, secret))  # coordinators look for new tokens once a second
    return out


def secret_in(token: Path) -> str:
    return str(json.loads(token.read_text())["secret"])


def serves(site: Site) -> bool:
    workers = site.status()["workers"]
    assert isinstance(workers, list)
    return any(worker["serving"] for worker in workers)


def newest(site: Site) -> int:
    published = site.status()["versions_published"]
    assert isinstance(published, int)
    return published


def _is_known(site: Site, secret: str) -> bool:
    request = Request(f"{site.url()}/v1/models", headers={"Authorization": f"Bearer {secret}"})
    try:
        with urlopen(request) as response:
            return bool(response.status == 200)
    except HTTPError as refusal:
        # The coordinator knows the token, but its role may not make this request.
        return refusal.code == 403
