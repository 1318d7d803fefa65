"""Episode played by an external program (online mode)."""

from __future__ import annotations

import asyncio

from areal_hpc.errors import HttpStatusError
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, EpisodeSpec
from areal_hpc.rollout.service_client import ServiceClient
from areal_hpc.wire.proxy import (
    AwaitSessionReply,
    AwaitSessionRequest,
    OfferEpisodeReply,
    OfferEpisodeRequest,
)

POLL_TIMEOUT_S = 10.0
"""How long the proxy may keep a request that waits for a program."""
CALL_TIMEOUT_S = 30.0


async def run_online_episode(spec: EpisodeSpec, proxy: ServiceClient) -> EpisodeOutcome:
    """Offer the episode until a program takes it, then wait until that ends its session.

    A program that takes longer than `spec.timeout_s`, or ends without a reward, costs no try of the
    ticket: the outcome is `interrupted`.
    """
    session_id = await _offered(spec, proxy)
    question = AwaitSessionRequest(session_id, POLL_TIMEOUT_S)
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + spec.timeout_s
    reason = f"the program took longer than {spec.timeout_s:g} s"
    while clock() < give_up_at:
        try:
            state = await proxy.call(
                "/rl/await_session", question, AwaitSessionReply, timeout_s=CALL_TIMEOUT_S
            )
        except HttpStatusError as refusal:
            reason = f"the proxy forgot the session: {refusal}"
            break
        if state.ended and state.reward is not None:
            return EpisodeOutcome("ok", session_id, reward=state.reward)
        if state.ended:
            reason = "the external program ended its session without a reward"
            break
    return EpisodeOutcome("interrupted", session_id, reason=reason)


async def _offered(spec: EpisodeSpec, proxy: ServiceClient) -> str:
    """The session of the program that came."""
    offer = OfferEpisodeRequest(spec.session, spec.data, POLL_TIMEOUT_S)
    while True:
        reply = await proxy.call(
            "/rl/offer_episode", offer, OfferEpisodeReply, timeout_s=CALL_TIMEOUT_S
        )
        if reply.session_id is not None:
            return reply.session_id
