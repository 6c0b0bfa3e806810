"""The engine keeps its contract with real servers."""

from pathlib import Path

import pytest

from echo2d.engines.server.launch import Running
from tests.support.engine_contract import EngineContract
from tests.support.engine_harness import Harness
from tests.support.sglang_harness import SglangHarness


class TestSglangEngine(EngineContract):
    @pytest.fixture
    def harness(self, tmp_path: Path, servers: list[Running]) -> Harness:
        return SglangHarness(tmp_path, servers)
