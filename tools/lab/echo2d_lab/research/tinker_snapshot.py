"""How long a client's new weights take from its optimizer step until every worker has drawn from them.

    python -m echo2d_lab.research.tinker_snapshot [--rounds 10] [--warm-up 2] [--tls] [--apart] [--json]

In the laboratory (`bench/lab/netlab`): coordinator, seed, learner and client are in one node, four workers with the
torch engine in others. Each node has 100 Mbit/s in both directions, and a round trip between any two takes 50 ms.
The adapter has 19.9 MB (rank 128, float32) on a model of 8 layers of width 256, whose weights are random. It spreads as
a delta to the one before, which is a little smaller: --rank 146 is a larger adapter, whose deltas have 20 MB.

    forward_backward, optim_step --> result   t = 0
    save_weights_for_sampler --> sampler      saved
    4 x slots samples of one token --> the seed encodes the version --> first frame --> verified --> serving
                                              drawn: the first token, in the log of each worker

If a worker has drawn none of these samples, as many are asked for again. All times are of this machine's one clock.
"""

import argparse
import asyncio
import json
import os
import re
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, Qwen3Config

from echo2d.demo.processes import start_worker, wait_for
from echo2d.net.tinker.routes import KEY_PREFIX
from echo2d.plan.kernel.scenario import PeerSpec
from echo2d.runtime.run_dir.tokens import create_token
from echo2d.tinker import messages_pb2 as pb
from echo2d_lab.bench.lab.cpu import CpuMeter, CpuShares
from echo2d_lab.bench.lab.netlab import Lab, LabPrograms
from echo2d_lab.research.tinker_rate import RETRY_S, ApiCalls

NAME = "org/tiny"
WORKERS, SLOTS = 4, 4
# All layers of a decoder layer have 4,864 inputs and outputs.
LAYERS, WIDTH, INNER, VOCABULARY = 8, 256, 768, 512
ROW_TOKENS, PROMPT_TOKENS = 64, 8
ADAM = {
    "learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0,
}  # fmt: skip
PORT = 7700
START_S, ROUND_S, LOOK_S = 300.0, 60.0, 0.05
LINE = re.compile(
    r"^(\S+) level=\S+ area=\S+ (first frame|verified|serving|generated|encoding|encoded)\b(.*)"
)
FACT = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True)
class SnapshotRound:
    """Seconds since the result of the optimizer step; those of workers in ascending order.

    step_s: of the optimizer step itself, before that. asked_s: when the sampler was there. late_s: the most by which
    the emulated network was late. wire_bytes: of the version. sent_bytes: by the learner's node, with headers.
    """

    step_s: float
    asked_s: float
    encoding_s: float
    encoded_s: float
    first_frame_s: list[float]
    verified_s: list[float]
    serving_s: list[float]
    drawn_s: list[float]
    # When the client had the first sample and all of the first wave.
    first_sample_s: float
    first_wave_s: float
    waves: int
    wire_bytes: int
    sent_bytes: int
    late_s: float
    cpu: CpuShares
    load: float


@dataclass(slots=True)
class ProgramLog:
    """Reads the lines that a program has written since the last time."""

    path: Path
    read: int = 0
    # By kind and version, when it was first logged, and with which facts.
    found: dict[tuple[str, int], tuple[float, dict[str, str]]] = field(default_factory=dict)

    def look(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if (match := LINE.match(line)) is not None:
                facts = dict(FACT.findall(match[3]))
                label = facts.get("version") or facts.get("versions") or "-1"
                key = match[2], int(label.partition("-")[0].strip('"'))
                self.found.setdefault(key, (datetime.fromisoformat(match[1]).timestamp(), facts))

    def at(self, kind: str, version: int) -> float:
        return self.found[kind, version][0]


def write_base(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS,
        head_dim=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: place for place, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Trained(ApiCalls):
    """A client with one model."""

    model = ""
    _number = 0
    _samples = 0

    async def open(self, rank: int) -> None:
        await self.wait_until_known()
        _, session = await self.post("create_session", {"sdk_version": "0.38.0"})
        asked = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": NAME}
        _, future = await self.post(
            "create_model", asked | {"lora_config": {"rank": rank, "seed": 1}}
        )
        self.model = (await self.result(future))["model_id"]

    async def call(self, route: str, **fields: Any) -> Any:
        """The result of an operation of the model."""
        self._number += 1
        said = {"model_id": self.model, "seq_id": self._number, **fields}
        _, future = await self.post(route, said)
        return await self.result(future)

    async def learn(self) -> None:
        """A gradient of one row of random tokens."""
        self._number += 1
        tokens = np.random.default_rng(self._number).integers(0, VOCABULARY, ROW_TOKENS + 1)
        inputs = {
            "target_tokens": _tensor(tokens[1:].astype("<i8"), pb.ELEMENT_INT64),
            "weights": _tensor(np.ones(ROW_TOKENS, "<f4"), pb.ELEMENT_FLOAT32),
        }
        text = pb.Text(tokens=tokens[:-1].astype("<i4").tobytes())
        datum = pb.TrainingDatum(chunks=[pb.InputChunk(text=text)], inputs=inputs)
        body = pb.ForwardBackwardCall(
            model=self.model, number=self._number, loss="cross_entropy", data=[datum]
        )
        _, future = await self.post("forward_backward", body.SerializeToString())
        await self.result(future)

    async def sample(self, sampler: str) -> float:
        """Draw one token, and return when it was there."""
        self._samples += 1
        prompt = [(self._samples + place) % VOCABULARY for place in range(PROMPT_TOKENS)]
        body = {
            "sampling_session_id": sampler,
            "seq_id": self._samples,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "stop": []},
        }
        _, future = await self.post("asample", body)
        found = await self.result(future)
        assert isinstance(found, bytes), found
        return time.time()


def _tensor(values: Any, element: Any) -> pb.Tensor:
    return pb.Tensor(dense=values.tobytes(), element=element, shape=values.shape)


@dataclass(slots=True)
class Site:
    """What a round needs."""

    lab: Lab
    programs: LabPrograms
    client: Trained
    coordinator: ProgramLog
    workers: list[ProgramLog]
    rounds: int = 0

    async def round(self) -> SnapshotRound:
        client, before = self.client, max(self._versions(), default=-1)
        await client.learn()
        self.lab.counts()  # so that late_s_max is that of this round
        sent, meter = self.lab.counts().nodes[0].up.link_bytes, CpuMeter(self.lab, self.programs)
        load = os.getloadavg()[0]
        stepping = time.time()
        await client.call("optim_step", adam_params=ADAM)
        began = time.time()
        saved = await client.call("save_weights_for_sampler", sampling_session_seq_id=self.rounds)
        self.rounds += 1
        asked, waves = time.time(), list[list[float]]()
        while True:
            some = [client.sample(saved["sampling_session_id"]) for _ in range(WORKERS * SLOTS)]
            waves.append(await asyncio.wait_for(asyncio.gather(*some), ROUND_S))
            await asyncio.sleep(LOOK_S)
            version = max(self._versions())
            if version > before and all(
                ("generated", version) in each.found for each in self.workers
            ):
                break
            assert time.time() - began < ROUND_S, [sorted(each.found)[-4:] for each in self.workers]
        counts, of_seed = self.lab.counts(), self.coordinator

        def of_workers(kind: str) -> list[float]:
            return sorted(each.at(kind, version) - began for each in self.workers)

        return SnapshotRound(
            step_s=began - stepping,
            asked_s=asked - began,
            encoding_s=of_seed.at("encoding", version) - began,
            encoded_s=of_seed.at("encoded", version) - began,
            first_frame_s=of_workers("first frame"),
            verified_s=of_workers("verified"),
            serving_s=of_workers("serving"),
            drawn_s=of_workers("generated"),
            first_sample_s=min(waves[0]) - began,
            first_wave_s=max(waves[0]) - began,
            waves=len(waves),
            wire_bytes=int(of_seed.found["encoded", version][1]["wire_bytes"]),
            sent_bytes=counts.nodes[0].up.link_bytes - sent,
            late_s=counts.late_s_max,
            cpu=meter.shares(),
            load=load,
        )

    def _versions(self) -> Iterator[int]:
        self.programs.check()
        for log in (self.coordinator, *self.workers):
            log.look()
        yield from (version for kind, version in self.coordinator.found if kind == "encoded")


@asynccontextmanager
async def a_site(lab: Lab, folder: Path, options: argparse.Namespace) -> AsyncIterator[Site]:
    """Start everything. The caller stays in its own node."""
    model, address = write_base(folder / "base"), lab.address(0)
    config = folder / "run.toml"
    config.write_text(
        f"""
[run]
run_dir = "coordinator"
base_model = "{model}"
[coordinator]
host = "0.0.0.0"
port = {PORT}
tls = "{"on" if options.tls else "off"}"
[link]
host = "{address}"
[tinker.models]
"{NAME}" = "{model}"
[learner]
threads = 1
"""
    )
    url, run = f"{'https' if options.tls else 'http'}://{address}:{PORT}", folder / "coordinator"
    flags = [f"--base-model={model}", f"--slots={SLOTS}", "--threads=1", "--log-level=debug"]
    flags += [] if options.tls else ["--no-tls"]
    with lab.programs(folder / "logs") as programs:
        with lab.inside(0):
            programs.start("coordinator", "-m", "echo2d", "tinker", f"--config={config}")
            wait_for(run / "coordinator.json", programs, START_S)
            programs.start("learner", "-m", "echo2d", "learn", f"--config={config}", "--serve")
        for node in range(1, WORKERS + 1):
            listen = f"--listen-host={lab.address(node)}"
            with lab.inside(node):
                start_worker(programs, f"box-{node}", folder, url, listen, *flags)
        token = folder / "client.token"
        create_token(run, "client", role="tinker", url=url, out=token, max_workers=1, expires="1d")
        said = json.loads(token.read_text())
        # The certificate is for the name `coordinator`, which the laboratory does not have.
        trusted = ssl.create_default_context(cadata=said["authority"]) if options.tls else None
        if trusted is not None:
            trusted.check_hostname = False
        logs = [ProgramLog(programs[f"box-{node}"].log) for node in range(1, WORKERS + 1)]
        connector = aiohttp.TCPConnector(limit=0, ssl=trusted or True)
        async with aiohttp.ClientSession(connector=connector) as http:
            client = Trained(http, url, KEY_PREFIX + str(said["secret"]))
            await client.open(options.rank)
            yield Site(lab, programs, client, ProgramLog(programs["coordinator"].log), logs)
        programs.check()


async def main_loop(options: argparse.Namespace, lab: Lab, folder: Path) -> list[SnapshotRound]:
    found = []
    async with a_site(lab, folder, options) as site:
        for number in range(options.warm_up + options.rounds):
            done = await site.round()
            is_warm_up = number < options.warm_up
            print("warming up:" if is_warm_up else "", line_of(done), file=sys.stderr, flush=True)
            found += [] if is_warm_up else [done]
            await asyncio.sleep(RETRY_S)
    return found


def line_of(done: SnapshotRound) -> str:
    def of_workers(times: list[float]) -> str:
        return f"{times[0]:.2f}-{times[-1]:.2f}"

    return (
        f"drawn {of_workers(done.drawn_s)} s; sampler {done.asked_s:.2f}, encoding {done.encoding_s:.2f}, encoded "
        f"{done.encoded_s:.2f}, first frame {of_workers(done.first_frame_s)}, verified {of_workers(done.verified_s)}, "
        f"serving {of_workers(done.serving_s)}; first sample {done.first_sample_s:.2f}, waves {done.waves}; "
        f"{done.wire_bytes / 1e6:.1f} MB, sent {done.sent_bytes / 1e6:.1f} MB; late {1000 * done.late_s:.0f} ms, "
        f"{done.cpu}; load {done.load:.1f}"
    )


def summary(found: list[SnapshotRound]) -> Mapping[str, float]:
    last = sorted(each.drawn_s[-1] for each in found)
    return {
        "drawn_s": median(last),
        "least_s": last[0],
        "most_s": last[-1],
        "first_drawn_s": median(each.drawn_s[0] for each in found),
        "step_s": median(each.step_s for each in found),
        "asked_s": median(each.asked_s for each in found),
        "encoding_s": median(each.encoding_s for each in found),
        "encoded_s": median(each.encoded_s for each in found),
        "first_frame_s": median(each.first_frame_s[-1] for each in found),
        "verified_s": median(each.verified_s[-1] for each in found),
        "serving_s": median(each.serving_s[-1] for each in found),
        "wire_bytes": median(each.wire_bytes for each in found),
        "sent_bytes": median(each.sent_bytes for each in found),
    }


def words_of(row: Mapping[str, float]) -> str:
    return (
        f"median {row['drawn_s']:.2f} s ({row['least_s']:.2f} to {row['most_s']:.2f}) until the last worker's first "
        f"token, after a step of {row['step_s']:.2f} s; sampler {row['asked_s']:.2f}, encoding "
        f"{row['encoding_s']:.2f}, encoded {row['encoded_s']:.2f}; of the last worker: first frame "
        f"{row['first_frame_s']:.2f}, verified {row['verified_s']:.2f}, serving {row['serving_s']:.2f}; "
        f"{row['wire_bytes'] / 1e6:.1f} MB, sent {row['sent_bytes'] / 1e6:.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="From an optimizer step to samples everywhere.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that do not count (2)")
    parser.add_argument("--rank", type=int, default=128, help="of the adapter (128)")
    parser.add_argument("--tls", action="store_true", help="as a run beyond loopback has it")
    parser.add_argument(
        "--apart", action="store_true", help="the client has a node of its own, as far as a worker"
    )
    parser.add_argument("--run-dir", type=Path, help="an empty folder to keep, with all logs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="snapshot-") as name:
        folder = Path(name) if options.run_dir is None else options.run_dir.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        nodes = 1 + WORKERS + options.apart
        with (
            Lab([PeerSpec()] * nodes, folder) as lab,
            lab.inside(nodes - 1 if options.apart else 0),
        ):
            found = asyncio.run(main_loop(options, lab, folder))
    row = summary(found)
    rounds = [asdict(each) for each in found]
    print(json.dumps({"rounds": rounds, **row}) if options.json else words_of(row))


if __name__ == "__main__":
    main()
