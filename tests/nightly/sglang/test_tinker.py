"""The Tinker API with a real SGLang server in the worker."""

from pathlib import Path

from tests.support.sglang_servers import FLAGS, PYTHON
from tests.support.tinker_engines import check_engine


def test_clients_draw_from_a_sglang_worker(tmp_path: Path) -> None:
    check_engine(tmp_path, "sglang", PYTHON, " ".join((*FLAGS, "--lora-backend", "torch_native")))
