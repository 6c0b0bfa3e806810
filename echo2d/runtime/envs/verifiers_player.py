"""Plays environments of `verifiers`, unmodified, with its own training client.

    taskset          verifiers.v1, in 0.3.1 and 0.4.0: a name or a function that makes an `Env`
    classic          verifiers before 0.4: a package with `load_environment`

A ticket's row is a row of the environment's dataset, modulo its length. A call of a taskset's agent
names its trace in X-Session-ID; a call of a classic environment has the ticket in `extra_headers`. The
reward is that of the trained agents (their mean, if there are several), and the trace is verifiers'
own record of all their calls. verifiers is imported only here, and only when it is needed.
"""

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from operator import itemgetter
from typing import Any

from echo2d.errors import OperatorFault
from echo2d.extras import install_command
from echo2d.net.gateway.episodes import TICKET_HEADER
from echo2d.runtime.envs.playing import EpisodePlayer
from echo2d.runtime.envs.tickets import EpisodeOutcome, PlayerTicket, TraceBranch

# The model's name in calls.
_MODEL = "policy"


@dataclass(frozen=True, slots=True)
class PolicyClient:
    """How verifiers' training client reaches the policy, and turns messages into tokens."""

    url: str
    tokenizer: str  # a directory or a name
    # A RendererConfig of `renderers` as JSON. None: `renderers` chooses one by the tokenizer's name.
    renderer: Mapping[str, Any] | None = None

    def renderer_config(self) -> Any:
        """OperatorFault: `renderers` has no such renderer, or not these options."""
        if self.renderer is None:
            return None
        from pydantic import TypeAdapter, ValidationError
        from renderers import RendererConfig

        try:
            return TypeAdapter(RendererConfig).validate_python(dict(self.renderer))
        except ValidationError as error:
            raise OperatorFault(f"--renderer: {_first_line(error)}") from error


def require_verifiers() -> None:
    """OperatorFault: verifiers is not installed here."""
    if find_spec("verifiers") is None:
        raise OperatorFault(
            "verifiers is not installed here; it installs much, so give it and echo2d an environment "
            f"of their own: {install_command('verifiers')}"
        )


def load_player(name: str, arguments: Mapping[str, Any], client: PolicyClient) -> EpisodePlayer:
    """The environment of this name: an installed one, or MODULE:FUNCTION that makes it.

    OperatorFault: the environment is not installed, or it cannot be made.
    """
    try:
        made = _make(name, arguments)
        if hasattr(made, "run_episode"):
            return TasksetPlayer(made, client)
        if hasattr(made, "run_rollout"):
            return ClassicPlayer(made, client)
    except OperatorFault:
        raise
    # Loading runs code of the environment, which may raise anything.
    except Exception as error:
        raise OperatorFault(f"cannot load {name}: {type(error).__name__}: {error}") from error
    raise OperatorFault(f"{name} makes a {type(made).__name__}, which is not an environment")


def _make(name: str, arguments: Mapping[str, Any]) -> Any:
    module, _, function = name.partition(":")
    if function:
        return getattr(import_module(module), function)(**arguments)
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config, taskset_class

    try:
        taskset_class(name)
    except (AttributeError, TypeError):
        # The package exports no taskset, so it may be a classic environment.
        package = import_module(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower())
        if not hasattr(package, "load_environment"):
            raise
        return package.load_environment(**arguments)
    taskset = {**arguments.get("taskset", {}), "id": name}
    return load_environment(resolve_env_config({**arguments, "taskset": taskset}))


class TasksetPlayer:
    """An `Env` of verifiers.v1."""

    def __init__(self, env: Any, client: PolicyClient) -> None:
        from verifiers.v1.clients import TrainClientConfig

        self._env, self._tasks = env, RowsOf(env.taskset)
        # One client serves all episodes, because verifiers keeps each client that it has made.
        self._client = TrainClientConfig(
            base_url=client.url,
            api_key_var="",
            renderer=client.renderer_config(),
            renderer_model_name=client.tokenizer,
        )

    def serving(self) -> AbstractAsyncContextManager[None]:
        served: AbstractAsyncContextManager[None] = self._env.serving()
        return served

    async def play(self, ticket: PlayerTicket, bind: Callable[[str], None]) -> EpisodeOutcome:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.types import SamplingConfig

        sampling = SamplingConfig(temperature=ticket.temperature, max_tokens=ticket.max_tokens)
        context = ModelContext(model=_MODEL, client=self._client, sampling=sampling)

        def begun(trace: Any) -> None:
            if _is_trained(trace):
                bind(trace.id)

        # `run_slot` may try twice, and a second attempt would be another episode.
        return outcome_of(
            await self._env.run_episode(self._tasks[ticket.row], context, on_trace=begun)
        )


def _is_trained(trace: Any) -> bool:
    return trace.agent is None or bool(trace.agent.trainable)


def outcome_of(episode: Any) -> EpisodeOutcome:
    """The outcome of an `Episode` of verifiers.v1."""
    traces = [trace for trace in episode.traces if _is_trained(trace)]
    if not episode.ok:
        errors = [each.last_error for each in (episode, *episode.traces) if each.last_error]
        return EpisodeOutcome.failed(
            f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"
        )
    if not traces:
        return EpisodeOutcome.failed("no agent of the environment is trained")
    named: dict[str, list[float]] = {}
    for trace in traces:
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored or not trace.rewards:
            return EpisodeOutcome.failed(f"rewards without a value: {unscored or 'all'}")
        rewards = {name: reward.value for name, reward in trace.rewards.items()}
        for name, value in {**trace.metrics, **rewards}.items():
            if value is not None:
                named.setdefault(name, []).append(float(value))
    return EpisodeOutcome(
        reward=sum(float(trace.reward) for trace in traces) / len(traces),
        parts={name: sum(values) / len(values) for name, values in named.items()},
        trace=joined(calls_of(traces)),
    )


def calls_of(traces: Iterable[Any]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """All calls of these traces, as prompts and answers, in the order of their answers."""
    calls = [
        (call.time.end, *_prompt_and_answer(trace.nodes, call.node))
        for trace in traces
        for call in trace.calls
        if call.node is not None
    ]
    return [(prompt, answer) for _, prompt, answer in sorted(calls, key=itemgetter(0))]


def _prompt_and_answer(nodes: Sequence[Any], leaf: int) -> tuple[list[int], list[int]]:
    """The tokens on the path to this node: those before its own answer, and its answer."""
    path = list[Any]()
    place: int | None = leaf
    while place is not None:
        path.append(nodes[place])
        place = nodes[place].parent
    tokens = [token for node in reversed(path) for token in node.token_ids]
    given = len(tokens) - sum(nodes[leaf].mask)
    return tokens[:given], tokens[given:]


class RewardErrors(logging.Handler):
    """Collects errors of reward functions, which classic verifiers logs and turns into a reward of 0.

    Each error is added to the list of the episode in whose context it was logged.
    """

    noted: ContextVar[list[str]] = ContextVar("noted")

    def emit(self, record: logging.LogRecord) -> None:
        self.noted.get([]).append(record.getMessage())


class ClassicPlayer:
    """An `Environment` of verifiers before 0.4."""

    def __init__(self, env: Any, client: PolicyClient) -> None:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        try:
            import_module("verifiers.clients.renderer_client")
        except ImportError as error:
            raise OperatorFault(
                "the training client of classic verifiers needs another version of renderers: "
                f"pip install renderers==0.1.10 ({error})"
            ) from error
        if env.requires_group_rollouts:
            raise OperatorFault(
                "the environment rewards rollouts by comparing them with others, and a ticket is "
                "one rollout"
            )
        self._env, self._rows = env, env.get_dataset()
        self._client = resolve_client(
            ClientConfig(
                client_type="renderer",
                api_key_var="",
                api_base_url=client.url,
                renderer_config=client.renderer_config(),
                renderer_model_name=client.tokenizer,
                # The endpoint already lets a call wait while the gateway is away, so its failures are final.
                max_retries=0,
            )
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        # The rubrics of classic verifiers log to this logger.
        rubrics, handler = (
            logging.getLogger("verifiers.legacy.rubrics"),
            RewardErrors(logging.ERROR),
        )
        rubrics.addHandler(handler)
        try:
            yield
        finally:
            rubrics.removeHandler(handler)
            await self._client.close()

    async def play(
        self,
        ticket: PlayerTicket,
        bind: Callable[[str], None],  # noqa: ARG002 - its calls carry the ticket
    ) -> EpisodeOutcome:
        errors = list[str]()
        RewardErrors.noted.set(errors)
        output = await self._env.run_rollout(
            dict(self._rows[ticket.row % len(self._rows)]),
            self._client,
            _MODEL,
            {
                "temperature": ticket.temperature,
                "max_tokens": ticket.max_tokens,
                "extra_headers": {TICKET_HEADER: ticket.ticket},
            },
            state_columns=["trajectory"],
        )
        if output.get("error"):
            return EpisodeOutcome.failed(str(output["error"]["error_chain_repr"]))
        if errors or output.get("reward") is None:
            return EpisodeOutcome.failed("; ".join(errors) or "the environment gave no reward")
        parts = {name: float(value) for name, value in (output["metrics"] or {}).items()}
        answers = [step["response"].message.tokens for step in output["trajectory"]]
        return EpisodeOutcome(
            reward=float(output["reward"]),
            parts=parts,
            trace=joined((each.prompt_ids, each.completion_ids) for each in answers),
        )


@dataclass(slots=True)
class _Branch:
    tokens: list[int] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)


def joined(answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[TraceBranch]:
    """The branches of these calls (prompts and answers), as the gateway counts them.

    A call that extends the newest branch continues it. Any other call begins a branch with its whole prompt.
    """
    branches = [_Branch()]
    for prompt, answer in answers:
        if (
            not branches[-1].tokens
            or list(prompt[: len(branches[-1].tokens)]) != branches[-1].tokens
        ):
            branches.append(_Branch())
        branch = branches[-1]
        branch.tokens = [*prompt, *answer]
        branch.written.append((len(prompt), len(branch.tokens)))
    return [TraceBranch(each.tokens, each.written) for each in branches[1:]]


class RowsOf:
    """Rows by number, modulo their count. An endless source is read only as far as needed."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._rest: Iterator[Any] = iter(source)
        self._read = list[Any]()

    def __getitem__(self, row: int) -> Any:
        self._read.extend(itertools.islice(self._rest, max(0, row + 1 - len(self._read))))
        if not self._read:
            raise IndexError("the environment's dataset is empty")
        return self._read[row % len(self._read)]


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
