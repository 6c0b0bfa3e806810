"""What a refit of a real server costs: the changed words in memory, or the whole model from disk.

    python -m echo2d_lab.research.refit_memory sglang|vllm [--gb 0.5 1 2] [--changed 0.01] [--rounds 5] [--json]

    memory   the words that differ are staged before the pause and written in it
    warm     the server reads the files in the pause, from the page cache
    cold     the same, after the files were dropped from the page cache

Two versions of a Qwen3 in bfloat16 alternate, of which this share of the words of each tensor differs. pause_s: from
pause to resume, medians of the rounds with the least and the greatest. whole_s: with what happens before and after the
pause, while samples run. The server runs on the CPU, on one thread (`tools/sglang_cpu`, `tools/vllm_cpu`).
"""

import argparse
import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2d.engines.server.engine import ServerEngine
from echo2d.engines.server.launch import ServerLaunch
from echo2d.engines.server.memory import ServerMemory
from echo2d.engines.sglang.engine import SglangEngine, SglangLaunch
from echo2d.engines.vllm.engine import VllmEngine, VllmLaunch

REPO = Path(__file__).resolve().parents[4]
WEIGHTS = "model.safetensors"
LAYERS, VOCABULARY = 16, 32_000
KINDS: dict[str, tuple[type[ServerEngine], type[ServerLaunch], str, tuple[str, ...]]] = {
    "sglang": (
        SglangEngine, SglangLaunch, "tools/sglang_cpu/python",
        ("--dtype", "bfloat16", "--max-total-tokens", "4000", "--sleep-on-idle"),
    ),
    "vllm": (
        VllmEngine, VllmLaunch, "tools/vllm_cpu/python",
        ("--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "8"),
    ),
}  # fmt: skip
WAYS = ("memory", "warm", "cold")


def write_versions(folder: Path, gigabytes: float, share: float) -> int:
    """Write the versions 0 and 1; returns the bytes of one."""
    hidden = 64
    while _model(hidden + 64)[1] <= gigabytes * 1e9:
        hidden += 64
    config, size = _model(hidden)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "0", max_shard_size="9GB")
    shutil.copytree(folder / "0", folder / "1")
    words = load_file(folder / "0" / WEIGHTS)
    for each in words.values():
        flat = each.flatten().view(torch.int16)
        flat[torch.randperm(len(flat))[: max(1, int(share * len(flat)))]] += 1
        each.copy_(flat.view(torch.bfloat16).view(each.shape))
    save_file(words, folder / "1" / WEIGHTS, metadata={"format": "pt"})
    return size


def _model(hidden: int) -> tuple[Qwen3Config, int]:
    """A config of this width, and the bytes of its weights in bfloat16."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64,
        max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return config, 2 * (2 * VOCABULARY * hidden + LAYERS * 13 * hidden * hidden)


def drop_cached(folder: Path) -> None:
    """Have the kernel forget the pages of these files."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@contextmanager
def from_disk() -> Iterator[None]:
    async def no(*_: object) -> bool:
        return False

    with patch.object(ServerMemory, "prepare", no):
        yield


async def measure(kind: str, folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """pause_s and whole_s of each refit, by its way."""
    engine_type, launch_type, python, flags = KINDS[kind]
    launch = launch_type(REPO / python, flags, folder / "server", dict(os.environ))
    engine, clock = engine_type(launch), asyncio.get_running_loop()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    await engine.start()
    try:
        await engine.refit(folder / "0", "start")
        for number in range(3 * rounds + 1):
            way, version = WAYS[number % 3], folder / str((number + 1) % 2)
            if way == "cold":
                await asyncio.to_thread(drop_cached, version)
            else:
                await asyncio.to_thread((version / WEIGHTS).read_bytes)
            began = clock.time()
            if way == "memory":
                report = await engine.refit(version, str(number))
            else:
                with from_disk():
                    report = await engine.refit(version, str(number))
            if number:  # the first one also fills caches
                found[way].append((report.pause_s, clock.time() - began))
    finally:
        await engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What a refit in memory and one from disk cost.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--changed", type=float, nargs="+", default=[0.01], help="share of words")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(2)
    for gigabytes in options.gb:
        for share in options.changed:
            with tempfile.TemporaryDirectory(prefix="refit-") as name:
                size = write_versions(Path(name), gigabytes, share)
                found = asyncio.run(measure(options.kind, Path(name), options.rounds))
            row: dict[str, object] = {"server": options.kind, "bytes": size, "changed": share}
            for way, refits in found.items():
                pauses = sorted(pause for pause, _ in refits)
                row[way] = {
                    "pause_s": round(median(pauses), 4),
                    "least": round(pauses[0], 4),
                    "most": round(pauses[-1], 4),
                    "whole_s": round(median(whole for _, whole in refits), 3),
                }
            print(json.dumps(row) if options.json else _line(row), flush=True)


def _line(row: dict[str, object]) -> str:
    ways = "  ".join(f"{way} {_shown(row[way])}" for way in WAYS)
    return f"{row['server']} {row['bytes']:,} bytes, {row['changed']:.1%} changed: {ways}"


def _shown(found: object) -> str:
    assert isinstance(found, dict)
    return f"{found['pause_s']} s ({found['least']}-{found['most']}; whole {found['whole_s']})"


if __name__ == "__main__":
    main()
