"""The gateway of a real coordinator with the official client, unmodified, and a worker with the torch engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from echo2d.client import Coordinator
from echo2d.runtime.run_dir.tokens import create_token
from tests.support.polling import poll
from tests.support.programs import Site

pytestmark = [pytest.mark.timeout(900)]

GATEWAY = """
[gateway]
enabled = true
share = 0.5
chat_template = "{template}"
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}>"
ASK: Any = [{"role": "user", "content": "3141"}]


def test_the_gateway_serves_the_policy_that_is_trained(site: Site) -> None:
    template = site.directory / "chat.jinja"
    template.write_text(TEMPLATE)
    site.config.write_text(site.config.read_text() + GATEWAY.format(template=template))
    site.coordinate()
    site.join("box", "--threads=1", "--slots=16", f"--base-model={site.facts['model']}")
    with Coordinator(site.url(), token_file=site.run_dir / "tokens" / "learner.token") as learner:
        learner.open_session(0)
        learner.publish(
            0, Path(shutil.copytree(str(site.facts["model"]), site.directory / "snapshots" / "0"))
        )
        client = openai.OpenAI(base_url=f"{site.url()}/v1", api_key=secret(site), max_retries=0)
        poll(lambda: is_known(client))  # coordinators look for new tokens once a second
        [model] = client.models.list().data
        assert model.id == "policy"

        ask: Any = {"model": "policy", "max_tokens": 6, "seed": 7}
        said = client.chat.completions.create(messages=ASK, n=3, logprobs=True, **ask)
        assert len(said.choices) == 3
        for choice in said.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            spans: Any = choice.model_extra and choice.model_extra["version_spans"]
            assert (spans[0]["start"], spans[-1]["end"]) == (0, len(choice.logprobs.content))
            assert {span["version"] for span in spans} == {0}

        stream = client.chat.completions.create(messages=ASK, stream=True, **ask)
        told = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert told == said.choices[0].message.content  # choice 0 of the same seed

        text = client.completions.create(prompt="3141>", **ask)
        assert text.choices[0].text == told

        with pytest.raises(openai.ConflictError, match="version 0 is the newest"):
            client.completions.create(
                prompt="1>", extra_headers={"X-Echo2d-Min-Version": "9"}, **ask
            )
    poll(lambda: len(records(site)) == 4)
    assert [record["outcome"] for record in records(site)] == ["done", "done", "done", "version"]
    gateway: Any = site.status()["gateway"]
    assert gateway["ended"] == {"done": 3, "version": 1}


def secret(site: Site) -> str:
    out = site.directory / "app.token"
    create_token(
        site.run_dir, "app", role="gateway", url=site.url(), out=out, max_workers=None, expires="1d"
    )
    return str(json.loads(out.read_text())["secret"])


def is_known(client: openai.OpenAI) -> bool:
    try:
        client.models.list()
    except openai.AuthenticationError:
        return False
    return True


def records(site: Site) -> list[dict[str, Any]]:
    path = site.run_dir / "gateway.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
