"""The torch engine also keeps the engine contract on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.support.engine_contract import EngineContract
from tests.support.engine_harness import Harness, TorchHarness


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestTorchEngineOnCuda(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Harness:
        return TorchHarness(tmp_path, device="cuda")
