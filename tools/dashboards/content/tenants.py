"""The RagCaches of a cluster side by side, and the tenants of their API keys."""

from __future__ import annotations

from typing import Final

from ragcache_wire.telemetry.catalogue import cachestore, engine, gateway, standard
from tools.dashboards.dashboard import Dashboard, Section
from tools.dashboards.panel import Panel, Query
from tools.dashboards.promql import RAGCACHES, quantile, rate, series, total

_BY: Final = ("namespace", "ragcache")
_NAME: Final = "{{namespace}}/{{ragcache}}"
_BY_TENANT: Final = (*_BY, "tenant")
_TENANT: Final = "{{namespace}}/{{ragcache}} {{tenant}}"
_API: Final = 'route=~"/v1/.*"'
_ALL_TENANT_TOKENS: Final = total(rate(gateway.TENANT_PROMPT_TOKENS, *RAGCACHES), *_BY_TENANT)

DASHBOARD: Final = Dashboard(
    "tenants",
    "Tenants",
    "Every RagCache by namespace and name: traffic, waiting time, errors, savings and size. Below "
    "are the tenants of their API keys: the first 100 of the file by name, the others together.",
    [
        Section(
            "Traffic and time",
            [
                Panel(
                    "Requests",
                    "Routes under /v1.",
                    [Query(total(rate(gateway.REQUESTS, *RAGCACHES, _API), *_BY), _NAME)],
                    unit="reqps",
                ),
                Panel(
                    "TTFT, p95",
                    "Never averaged over RagCaches.",
                    [Query(quantile(0.95, gateway.TIME_TO_FIRST_TOKEN, *RAGCACHES, by=_BY), _NAME)],
                    unit="s",
                ),
                Panel(
                    "Share of prompt tokens not computed",
                    "By RagCache.",
                    [
                        Query(
                            total(
                                rate(
                                    gateway.PROMPT_TOKENS,
                                    *RAGCACHES,
                                    'source=~"loaded|blended|local"',
                                ),
                                *_BY,
                            )
                            + f" / {total(rate(gateway.PROMPT_TOKENS, *RAGCACHES), *_BY)}",
                            _NAME,
                        )
                    ],
                    unit="percentunit",
                    maximum=1,
                ),
                Panel(
                    "Prefill time saved",
                    "Seconds per second.",
                    [Query(total(rate(engine.SAVED_SECONDS, *RAGCACHES), *_BY), _NAME)],
                ),
            ],
        ),
        Section(
            "Use of resources",
            [
                Panel(
                    "Tokens of prompts and answers",
                    "Per second, by RagCache and type.",
                    [
                        Query(
                            total(
                                rate(gateway.TOKEN_USAGE, *RAGCACHES, suffix="_sum"),
                                *_BY,
                                "gen_ai_token_type",
                            ),
                            f"{_NAME} {{{{gen_ai_token_type}}}}",
                        )
                    ],
                ),
                Panel(
                    "Stored bytes",
                    "On disk.",
                    [Query(total(series(cachestore.USED, *RAGCACHES, 'tier="disk"'), *_BY), _NAME)],
                    unit="bytes",
                ),
                Panel(
                    "CPU",
                    "Cores of all processes.",
                    [Query(total(rate(standard.PROCESS_CPU, *RAGCACHES), *_BY), _NAME)],
                ),
                Panel(
                    "Clients that disconnected",
                    "Per second.",
                    [Query(total(rate(gateway.CLIENT_DISCONNECTS, *RAGCACHES), *_BY), _NAME)],
                    unit="ops",
                ),
            ],
        ),
        Section(
            "Tenants of API keys",
            [
                Panel(
                    "Requests by tenant",
                    "Requests under /v1.",
                    [Query(total(rate(gateway.TENANT_REQUESTS, *RAGCACHES), *_BY_TENANT), _TENANT)],
                    unit="reqps",
                ),
                Panel(
                    "TTFT by tenant, p95",
                    "A tenant that waits longer than the others may need a better priority.",
                    [
                        Query(
                            quantile(
                                0.95,
                                gateway.TENANT_TIME_TO_FIRST_TOKEN,
                                *RAGCACHES,
                                by=_BY_TENANT,
                            ),
                            _TENANT,
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Requests refused or failed by tenant",
                    "Wrong requests and those over a limit are refused. Those that a part could "
                    "not answer have failed.",
                    [
                        Query(
                            total(
                                rate(
                                    gateway.TENANT_REQUESTS,
                                    *RAGCACHES,
                                    'outcome=~"refused|failed"',
                                ),
                                *_BY_TENANT,
                                "outcome",
                            ),
                            f"{_TENANT} {{{{outcome}}}}",
                        )
                    ],
                    unit="reqps",
                ),
                Panel(
                    "Share of prompt tokens not computed by tenant",
                    "Tenants share no KV, so each one has to ask about a document once.",
                    [
                        Query(
                            total(
                                rate(
                                    gateway.TENANT_PROMPT_TOKENS,
                                    *RAGCACHES,
                                    'source=~"loaded|blended|local"',
                                ),
                                *_BY_TENANT,
                            )
                            + f" / ({_ALL_TENANT_TOKENS} > 0)",
                            _TENANT,
                        )
                    ],
                    unit="percentunit",
                    maximum=1,
                ),
                Panel(
                    "Tokens of answers by tenant",
                    "Per second.",
                    [
                        Query(
                            total(rate(gateway.TENANT_OUTPUT_TOKENS, *RAGCACHES), *_BY_TENANT),
                            _TENANT,
                        )
                    ],
                ),
            ],
        ),
    ],
    gateway.REQUESTS,
)
