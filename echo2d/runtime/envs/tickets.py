"""Asks a run for tickets, and ends their episodes.

    ask --200--> a ticket --played--> end --200--> counted, or refused with a reason
        --503--> ask again after Retry-After      --410--> dropped

A ticket is one sample that the run wants played. Nothing is kept here: a program that is killed
loses its running episodes, and their tickets expire.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from echo2d.errors import OperatorFault, PeerFault
from echo2d.net.gateway.episodes import (
    EPISODE_PARTS_MAX,
    ERROR_CHARS_MAX,
    PART_NAME_CHARS_MAX,
)
from echo2d.runtime.envs.gateway_link import COME_BACK, GatewayAway, GatewayLink

_EPISODES = "/v1/episodes"


@dataclass(frozen=True, slots=True)
class PlayerTicket:
    """One episode to play."""

    ticket: str
    task: str
    row: int  # of the dataset; all samples of a group have the same row
    temperature: float
    max_tokens: int
    silence_s: float  # without a call for this long, the ticket expires

    @staticmethod
    def read(fields: Mapping[str, Any]) -> "PlayerTicket":
        """The ticket in a gateway's answer. PeerFault: a field is missing or has another type."""
        try:
            found = PlayerTicket(
                ticket=str(fields["ticket"]),
                task=str(fields["task"]),
                row=int(fields["row"]),
                temperature=float(fields["temperature"]),
                max_tokens=int(fields["max_tokens"]),
                silence_s=float(fields["silence_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PeerFault(f"the gateway's ticket cannot be read: {error!r}") from error
        if not found.ticket or found.row < 0 or not 0 < found.silence_s < math.inf:
            raise PeerFault(
                "the gateway's ticket has an empty name, a negative row or no silence_s"
            )
        return found


@dataclass(frozen=True, slots=True)
class TraceBranch:
    """One branch as the player's client saw it, from the first token of its prompt."""

    token_ids: Sequence[int]
    written: Sequence[tuple[int, int]]  # the ranges that the policy wrote


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """How an episode ended. An episode with an error has no reward: it is left out, and does not count as 0."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    trace: Sequence[TraceBranch] = ()
    error: str = ""

    @staticmethod
    def failed(reason: str) -> "EpisodeOutcome":
        return EpisodeOutcome(error=" ".join(reason.split())[:ERROR_CHARS_MAX] or "no reason given")

    def body(self) -> dict[str, Any]:
        """The end as the gateway reads it."""
        if self.error:
            return {"error": self.error}
        if not math.isfinite(self.reward):
            return {"error": f"the reward is {self.reward}, which is not a finite number"}
        named = {
            name[:PART_NAME_CHARS_MAX]: value
            for name, value in self.parts.items()
            if math.isfinite(value)
        }
        return {
            "reward": self.reward,
            "parts": dict(list(named.items())[:EPISODE_PARTS_MAX]),
            "trace": [
                {
                    "token_ids": list(each.token_ids),
                    "written": [list(span) for span in each.written],
                }
                for each in self.trace
            ],
        }


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """The gateway's answer to an end."""

    dropped: bool = False  # the ticket was no longer valid
    refused: str = ""  # the reason; empty: the end was accepted or dropped


async def ask_ticket(link: GatewayLink, task: str | None) -> PlayerTicket:
    """Wait for the next ticket. OperatorFault: the run will never give one."""
    # The gateway waits this long for an episode before it answers 503.
    body = json.dumps({**({"task": task} if task else {}), "wait_s": 20.0}).encode()
    answer = await link.ask("POST", _EPISODES, body, patience_s=None)
    if answer.status == HTTPStatus.OK:
        return PlayerTicket.read(answer.fields())
    if answer.status == HTTPStatus.NOT_FOUND:
        raise OperatorFault(
            "there are no tickets at this URL: it needs a coordinator with [gateway] enabled and a "
            f'[[task]] of kind "agents" ({answer.reason()})'
        )
    if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise OperatorFault(f"the gateway gives no ticket: {answer.reason()}")
    raise PeerFault(f"the gateway gives no ticket: {answer.reason()}")


async def end_episode(
    link: GatewayLink, ticket: PlayerTicket, end: Mapping[str, Any], *, patience_s: float
) -> EndedEpisode:
    """Tell the gateway how the episode ended. GatewayAway: it does not answer, or has just started and does not
    know the episode yet.
    """
    answer = await link.ask(
        "POST", f"{_EPISODES}/{ticket.ticket}/end", json.dumps(end).encode(), patience_s=patience_s
    )
    if answer.status == HTTPStatus.OK:
        return EndedEpisode(refused=str(answer.fields().get("differs") or ""))
    if answer.status in {HTTPStatus.GONE, HTTPStatus.NOT_FOUND}:
        return EndedEpisode(dropped=True)
    if answer.status in COME_BACK:
        raise GatewayAway(answer.reason())
    return EndedEpisode(refused=answer.reason())
