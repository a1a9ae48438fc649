"""What the cache saves, how long users wait, and what fails."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.catalogue import engine, gateway, standard
from tools.dashboards.dashboard import Dashboard, Section
from tools.dashboards.panel import Panel, Query
from tools.dashboards.promql import RAGCACHES, increase, quantile, rate, series, total

_RANGE: Final = "$__range"
_REUSED: Final = 'source=~"loaded|blended|local"'
_API: Final = 'route=~"/v1/.*"'

_prompt_tokens: Final = total(rate(gateway.PROMPT_TOKENS, *RAGCACHES))
# The parts of a retrieval are stages of their own.
_stage_seconds: Final = total(
    rate(gateway.STAGE, *RAGCACHES, 'stage!="retrieve"', suffix="_sum"), "stage"
)
_answers: Final = total(rate(gateway.REQUEST_DURATION, *RAGCACHES, suffix="_count"))

DASHBOARD: Final = Dashboard(
    "overview",
    "Overview",
    "What the cache saves, how long users wait for a first token, and what fails.",
    [
        Section(
            "Saved",
            [
                Panel(
                    "Prompt tokens not computed",
                    "Tokens whose KV came from the store or from an engine's own cache, in the "
                    "chosen time.",
                    [
                        Query(
                            total(
                                increase(gateway.PROMPT_TOKENS, *RAGCACHES, _REUSED, window=_RANGE)
                            )
                        )
                    ],
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Share of prompt tokens not computed",
                    "Of all prompt tokens. It falls when questions need documents that were not "
                    "asked for before, or when the store evicts too early.",
                    [
                        Query(
                            f"{total(rate(gateway.PROMPT_TOKENS, *RAGCACHES, _REUSED))} / "
                            f"{_prompt_tokens}"
                        )
                    ],
                    unit="percentunit",
                    kind="stat",
                    width=6,
                    maximum=1,
                ),
                Panel(
                    "Prefill time saved",
                    "Predicted time to compute what was loaded, less the time that loading took, "
                    "in the chosen time. Engines spend it on other requests.",
                    [Query(total(increase(engine.SAVED_SECONDS, *RAGCACHES, window=_RANGE)))],
                    unit="s",
                    kind="stat",
                    width=6,
                ),
                Panel(
                    "Excess over computing",
                    "Time of loads beyond the predicted time of computing instead. If it "
                    "exceeds the time saved, the store is too slow: see the cache dashboard.",
                    [Query(total(increase(engine.EXCESS_SECONDS, *RAGCACHES, window=_RANGE)))],
                    unit="s",
                    kind="stat",
                    width=6,
                ),
            ],
        ),
        Section(
            "Time to first token",
            [
                Panel(
                    "TTFT",
                    "From a question's arrival at the gateway to the first token of its answer.",
                    [
                        Query(
                            quantile(share, gateway.TIME_TO_FIRST_TOKEN, *RAGCACHES),
                            f"p{share * 100:g}",
                            exemplars=True,
                        )
                        for share in (0.5, 0.95, 0.99)
                    ],
                    unit="s",
                ),
                Panel(
                    "Mean TTFT by stage",
                    "Where the time goes: search, queue, loads, recomputation or prefill.",
                    [
                        Query(
                            f"{_stage_seconds} / ignoring (stage) group_left () {_answers}",
                            "{{stage}}",
                        )
                    ],
                    unit="s",
                    stacked=True,
                ),
                Panel(
                    "Time per output token",
                    "After the first token. Prefills of other requests raise it.",
                    [
                        Query(
                            quantile(share, gateway.TIME_PER_OUTPUT_TOKEN, *RAGCACHES),
                            f"p{share * 100:g}",
                            exemplars=True,
                        )
                        for share in (0.5, 0.95)
                    ],
                    unit="s",
                ),
                Panel(
                    "Answers by what was loaded",
                    "full: all that was planned. none: the prompt was computed.",
                    [Query(total(rate(gateway.ANSWERS, *RAGCACHES), "loaded"), "{{loaded}}")],
                    unit="ops",
                    stacked=True,
                ),
            ],
        ),
        Section(
            "Requests and errors",
            [
                Panel(
                    "Requests by status",
                    "All routes under /v1.",
                    [Query(total(rate(gateway.REQUESTS, *RAGCACHES, _API), "code"), "{{code}}")],
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Failed calls to other parts",
                    "By the part that failed. 503 answers follow if no other replica answers.",
                    [Query(total(rate(gateway.UPSTREAM_FAILURES, *RAGCACHES), "part"), "{{part}}")],
                    unit="ops",
                ),
                Panel(
                    "Parts that Prometheus reaches",
                    "Replicas by component. A drop means that a pod is not scraped or not up.",
                    [
                        Query(
                            total(series(standard.UP, *RAGCACHES, 'component!=""'), "component"),
                            "{{component}}",
                        )
                    ],
                ),
                Panel(
                    "Memory of processes",
                    "Resident memory by pod.",
                    [Query(series(standard.PROCESS_MEMORY, *RAGCACHES), "{{component}} {{pod}}")],
                    unit="bytes",
                ),
            ],
        ),
    ],
    gateway.REQUESTS,
)
