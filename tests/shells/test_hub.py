"""Models and rows of the Hugging Face hub, loaded from a server of the test with the same API."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from pyarrow import parquet
from safetensors.numpy import save_file

from echo2d import hub
from echo2d.cli import main
from echo2d.errors import OperatorFault
from tests.support.local_hub import LocalHub, commit_of, local_hub
from tests.support.texts import write_text_model

SECRET = "hf_secretOfTheHub"
SPLITS = ("main/train-00000-of-00002", "main/train-00001-of-00002", "main/test-00000-of-00001")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    model = write_text_model(tmp_path / "base")
    for name in (
        "model.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "modeling.py",
    ):
        (model / name).write_bytes(b"")
    save_file({"lm_head.weight": np.zeros((2, 2), np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 400}')
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    questions = {"question": [f"{n} + 1?" for n in range(40)]}
    rows = pa.table({**questions, "answer": [f"x #### {n + 1}" for n in range(40)]})
    (tmp_path / "rows" / "main").mkdir(parents=True)
    for each in SPLITS:
        parquet.write_table(rows, tmp_path / "rows" / f"{each}.parquet")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "rows.csv").write_text("question,answer\n")
    (tmp_path / "made" / "default" / "train").mkdir(parents=True)
    parquet.write_table(rows, tmp_path / "made" / "default" / "train" / "0000.parquet")
    folders = {
        "models/o/m": {"main": model, "v1": model},
        "models/o/pickled": {"main": tmp_path / "pickled"},
        "datasets/o/rows": {"main": tmp_path / "rows"},
        "datasets/o/plain": {
            "main": tmp_path / "plain",
            "refs/convert/parquet": tmp_path / "made",
        },
        "datasets/o/none": {"main": tmp_path / "plain", "refs/convert/parquet": tmp_path / "plain"},
    }
    with local_hub(LocalHub(folders, frozenset({"models/o/gated"}))) as answering:
        # As after a start with HF_ENDPOINT and HF_HOME.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, answering.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", answering.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", SECRET)
        monkeypatch.chdir(tmp_path)
        yield answering


def test_a_model_is_loaded_at_one_commit_without_programs(
    served: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        found = hub.load_model("o/m")
    assert found.name == commit_of("models/o/m", "main")
    names = {each.name for each in found.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not names & {"consolidated.safetensors", "pytorch_model.bin", "modeling.py"}
    assert hub.load_model("o/m@v1").name == commit_of("models/o/m", "v1")
    assert f"Bearer {SECRET}" in served.tokens
    assert SECRET not in caplog.text


def test_rows_are_read_from_the_parquet_files_of_one_split(served: LocalHub) -> None:
    found = hub.load_rows("o/rows:main/train")
    assert [each.name for each in found] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert found[0].parents[1].name == commit_of("datasets/o/rows", "main")
    (made,) = hub.load_rows("o/plain")
    assert made.parents[2].name == commit_of("datasets/o/plain", "refs/convert/parquet")


@pytest.mark.parametrize(
    ("load", "name", "said"),
    [
        (hub.load_model, "o/pickled", "o/pickled has no *.safetensors on the hub, and other weights may hold programs"),
        (hub.load_model, "o/gated", "o/gated is gated: accept its terms on its page of the hub, then type hf auth"),
        (hub.load_model, "o/nothing", "o/nothing is neither a path here nor a model on the hub"),
        (hub.load_model, "o/m@v9", "o/m@v9: the hub has no such revision"),
        (hub.load_rows, "o/rows", "--rows o/rows: expected one of o/rows:main/test, o/rows:main/train"),
        (hub.load_rows, "o/rows:main/trian", "expected one of o/rows:main/test, o/rows:main/train"),
        (hub.load_rows, "o/none", "--rows o/none has no Parquet files on the hub"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_loaded_gives_one_line(
    served: LocalHub, load: object, name: str, said: str
) -> None:
    assert callable(load)
    with pytest.raises(OperatorFault) as refused:
        load(name)
    assert said in str(refused.value)
    assert SECRET not in str(refused.value)


def test_an_unreachable_hub_gives_a_line_with_the_command_for_another_host(
    served: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for load, name, line in (
        (hub.load_model, "Qwen/Qwen3-4B", "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"),
        (hub.load_rows, "o/r@v1:main/train", "hf download o/r --repo-type dataset --revision v1 --local-dir r"),
    ):  # fmt: skip
        with pytest.raises(OperatorFault) as refused:
            load(name)
        assert line in str(refused.value)


def test_an_existing_folder_is_preferred_to_the_hub(served: LocalHub, tmp_path: Path) -> None:
    assert hub.names_a_repository("o/m")
    (tmp_path / "o" / "m").mkdir(parents=True)
    assert not hub.names_a_repository("o/m")
    assert not hub.names_a_repository("models/qwen/base")
    assert not hub.names_a_repository("./rows.csv")


def test_init_takes_a_model_and_rows_by_name(served: LocalHub) -> None:
    words = ["--yes", "--json", "--host=127.0.0.1", "--base-model=o/m", "--rows=o/rows:main/train"]
    more = ["--scorer=exact", "--max-new-tokens=20"]
    result = CliRunner().invoke(main, ["init", *words, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    text = Path(told["config"]).read_text()
    assert commit_of("models/o/m", "main") in text
    assert text.count(commit_of("datasets/o/rows", "main")) == 2
    assert SECRET not in result.output
