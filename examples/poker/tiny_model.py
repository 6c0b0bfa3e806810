"""Make a tiny real model for poker: Qwen3, 76 k parameters, in the alphabet of the environment.

It knows that an action comes behind "?", and nothing else: not what a card is worth, nor when a
raise is legal. A few supervised steps on words by chance teach it that, in seconds.
"""

import json
from pathlib import Path
from typing import Any

from examples.environments.poker.notation import ACTION_TOKENS, POKER_VOCABULARY, TOKEN_OF

PAD, EOS, ASK = (TOKEN_OF[word] for word in ("<pad>", "<eos>", "?"))
STEPS = 60
ROWS, WORDS = 32, 24  # of a step
ASK_SHARE = 0.2  # of the words
LR = 2e-3


def make_poker_model(directory: Path, *, rng_seed: int) -> None:
    """Write a Hugging Face model directory. The same seed gives the same weights on one machine."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng_seed)
        model = _new_model()
        _teach_to_act(model)
    model.to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)


def _new_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(POKER_VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def _teach_to_act(model: Any) -> None:
    """Behind "?" every action becomes equally likely."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(STEPS):
        words = torch.randint(len(POKER_VOCABULARY), (ROWS, WORDS))
        words[torch.rand(ROWS, WORDS) < ASK_SHARE] = ASK
        logprobs = model(input_ids=words, use_cache=False).logits.float().log_softmax(-1)
        loss = -logprobs[words == ASK][:, list(ACTION_TOKENS)].mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def _write_tokenizer(directory: Path) -> None:
    """One token for each word; words are separated by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(dict(TOKEN_OF), unk_token=POKER_VOCABULARY[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([POKER_VOCABULARY[PAD], POKER_VOCABULARY[EOS]])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": POKER_VOCABULARY[PAD],
        "eos_token": POKER_VOCABULARY[EOS],
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
