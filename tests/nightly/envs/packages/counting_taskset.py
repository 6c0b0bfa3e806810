"""An environment package for verifiers.v1 (0.3.1 and 0.4.0): four turns about rows in memory.

After each answer comes a user's message or a tool's result, in turn. With `fails_every` n, every
n-th row raises while it is scored, as an environment with a bug does.
"""

import aiohttp
import verifiers.v1 as vf

TURNS = 4
ROWS = 12
__all__ = ["CountingHarness", "CountingTaskset"]


class CountingConfig(vf.TasksetConfig):  # type: ignore[misc]
    fails_every: int = 0


class CountingTask(vf.Task):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def even(self, trace: vf.Trace) -> float:
        """The share of answers whose number of characters is even."""
        if (self.data.name or "") == "fails":
            raise RuntimeError("this row has a bug")
        answers = [message.content or "" for message in trace.assistant_messages]
        return sum(len(each) % 2 == 0 for each in answers) / len(answers)

    @vf.metric  # type: ignore[untyped-decorator]
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CountingTaskset(vf.Taskset[CountingTask, CountingConfig]):  # type: ignore[misc]
    def load(self) -> list[CountingTask]:
        every = self.config.fails_every
        return [
            CountingTask(
                vf.TaskData(
                    idx=row,
                    prompt=f"{row}: What is {row} + 1?",
                    name="fails" if every and row % every == every - 1 else None,
                ),
                self.config.task,
            )
            for row in range(ROWS)
        ]


class CountingHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """The loop of turns, in this process: it starts no program."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # type: ignore[no-untyped-def]
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_
    ):
        messages = [{"role": "user", "content": data.prompt}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as session:
            for turn in range(TURNS):
                body = {"model": ctx.model, "messages": messages}
                async with session.post(f"{endpoint}/chat/completions", json=body) as response:
                    if response.status != 200:
                        return vf.ProgramResult(1, "", await response.text())
                    answer = (await response.json())["choices"][0]["message"]
                if turn % 2:
                    reply = {"role": "user", "content": f"and {turn}?"}
                else:
                    reply = {"role": "tool", "tool_call_id": "c", "content": "</tool_response>11"}
                messages += [answer, reply]
        return vf.ProgramResult(0, "", "")
