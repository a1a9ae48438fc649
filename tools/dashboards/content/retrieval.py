"""Searches: their time by part, their stages, and the replicas that answer them."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.catalogue import gateway, retriever
from tools.dashboards.dashboard import Dashboard, Section
from tools.dashboards.panel import Panel, Query
from tools.dashboards.promql import RAGCACHES, quantile, rate, total

_answered: Final = total(rate(retriever.SEARCHES, *RAGCACHES, 'outcome="answered"'))

DASHBOARD: Final = Dashboard(
    "retrieval",
    "Retrieval",
    "Searches: time, stages and outcomes.",
    [
        Section(
            "Searches",
            [
                Panel(
                    "Searches by outcome",
                    "refused: more than spec.retriever.limits.searches at once.",
                    [Query(total(rate(retriever.SEARCHES, *RAGCACHES), "outcome"), "{{outcome}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Search time by part, p95",
                    "embed is the question's embedding, search the index and the ranking.",
                    [
                        Query(
                            quantile(0.95, retriever.SEARCH_DURATION, *RAGCACHES, by=("part",)),
                            "{{part}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Retrieval as the gateway sees it",
                    "From the start of a search to its final stage, with the network.",
                    [
                        Query(
                            quantile(share, gateway.STAGE, *RAGCACHES, 'stage="retrieve"'),
                            f"p{share * 100:g}",
                            exemplars=True,
                        )
                        for share in (0.5, 0.95)
                    ],
                    unit="s",
                ),
                Panel(
                    "Stages per search",
                    "Searches with a stage before the final one let a prefill begin early.",
                    [
                        Query(
                            f"{total(rate(retriever.SEARCH_STAGES, *RAGCACHES), 'stage')} / "
                            f"ignoring (stage) group_left () {_answered}",
                            "{{stage}}",
                        )
                    ],
                    stacked=True,
                ),
                Panel(
                    "Hits per search",
                    "Chunks of final stages.",
                    [Query(f"{total(rate(retriever.SEARCH_HITS, *RAGCACHES))} / {_answered}")],
                ),
            ],
        ),
    ],
    retriever.SEARCHES,
)
