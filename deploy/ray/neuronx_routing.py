"""The replica for a request, and the number of replicas. Ray pickles this module by value: it imports Ray alone.

A conversation has a home, a replica that follows from its beginning alone (rendezvous hashing): several gateways agree
on it without a word, a restart forgets nothing, and a replica that comes or goes moves only its share of conversations.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PrefixRouter(RequestRouter):
    """The home of a conversation while it has a free slot; else the less busy one of two (power of two choices).

    A conversation's beginning is its `session_id`, which the gateway sets. A cached prefix saves a prefill, and a wait
    for a slot takes longer than that.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`. A replica whose engine is being started again is left out while there are others."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        takers = [one for one in candidate_replicas if one.routing_stats.get("alive", True)]
        takers = takers or candidate_replicas
        # Ray forgets a count after ten seconds, and it has no request of another gateway.
        free = [one for one in takers if not one.routing_stats.get("full", False)]
        two = random.sample(free or takers, min(2, len(free or takers)))
        beginning = pending_request.metadata.session_id if pending_request is not None else ""
        if not beginning or not takers:
            return [two]
        home = max(takers, key=lambda one: _weight(beginning, one.replica_id.unique_id))
        running = self.replica_queue_len_cache.get(home.replica_id) or 0
        slots = home.replica_metadata.get("slots", home.max_ongoing_requests)
        is_free = home in free and running < slots
        return [[home], two] if is_free else [two, [home]]


def _weight(beginning: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{beginning} {replica}".encode(), digest_size=8).digest()


def replicas_by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """The replicas that Ray's autoscaler aims at: sequences that run and wait, over `target_ongoing_requests`.

    Ray applies its bounds, factors and delays to the number. Its own policy counts HTTP requests: one with several
    prompts, or `n` answers, is one there.
    """
    loads = (context.aggregated_metrics or {}).get("load", {})
    total = sum(loads.values()) + context.total_queued_requests
    return total / context.config.get_target_ongoing_requests(), {}
