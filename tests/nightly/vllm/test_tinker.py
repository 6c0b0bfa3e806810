"""The Tinker API with a real vLLM server in the worker."""

from pathlib import Path

from tests.support.tinker_engines import check_engine
from tests.support.vllm_servers import PYTHON


def test_clients_draw_from_a_vllm_worker(tmp_path: Path) -> None:
    told = check_engine(tmp_path, "vllm", PYTHON, "--dtype float32 --max-num-seqs 64")
    first, again = ([each["tokens"] for each in told[name]] for name in ("first", "first again"))
    assert again == first, "the same seed draws the same tokens"
