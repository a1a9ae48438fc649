"""Environment variables and mounts that every pod and Job of a RagCache has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from ragcache_operator.builders.environment import EnvValue, FromConfigMap, FromSecret
from ragcache_operator.builders.pod import Mount
from ragcache_operator.spec.pods import EnvVarSpec, ProxySpec
from ragcache_operator.spec.ragcache import RagCache

_CA_FOLDER: Final = "/etc/ragcache/trusted-ca"
_CA_FILE: Final = "ca.crt"
_CA_VARIABLES: Final = (
    # OpenSSL in Python and in the Hugging Face libraries, requests, git, curl, and gRPC.
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE"),
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)
_PROXY_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_ADDRESSES: Final = ("HF_ENDPOINT", *_PROXY_VARIABLES)
"""Variables whose values are URLs that pods connect to."""
_INSIDE: Final = ("localhost", "127.0.0.1", ".svc", ".cluster.local")
"""Hosts that no pod reaches through a proxy. The names of our Services end with ``.svc``."""


def shared_environment(cache: RagCache, *, is_cluster: bool) -> dict[str, EnvValue]:
    """Return the variables of ``spec.env``, and in a cluster those of the proxy and authorities.

    ``spec.env`` overrides the others. With a proxy of either field, hosts inside the cluster are in
    NO_PROXY, beside those that the spec gives.
    """
    own = {variable.name: _value(variable) for variable in cache.spec.env}
    if not is_cluster:
        return own
    found: dict[str, EnvValue] = {**_authorities(cache), **_proxies(cache.spec.proxy), **own}
    if not any(name.upper() in _PROXY_VARIABLES for name in found):
        return found
    given = [] if cache.spec.proxy is None else cache.spec.proxy.no_proxy
    for name in ("NO_PROXY", "no_proxy"):
        more = own.get(name) or own.get("NO_PROXY") or own.get("no_proxy") or ""
        # A value in a Secret cannot be extended.
        if isinstance(more, str):
            hosts = (*_INSIDE, *_hosts_inside(cache), *given, *more.split(","))
            found[name] = ",".join(dict.fromkeys(host.strip() for host in hosts if host.strip()))
    return found


def shared_mounts(cache: RagCache, *, is_cluster: bool) -> list[Mount]:
    """Return the read-only mount of the authorities in a cluster."""
    authorities = cache.spec.trusted_ca
    if authorities is None or not is_cluster:
        return []
    items = [{"key": authorities.key, "path": _CA_FILE}]
    volume = {"configMap": {"name": authorities.config_map, "items": items}}
    return [Mount("trusted-ca", _CA_FOLDER, volume, read_only=True)]


def proxy_urls(cache: RagCache) -> list[str]:
    """Return the URLs of proxies and of a mirror of the hub. Those in Secrets are unknown."""
    values = shared_environment(cache, is_cluster=True)
    found = (value for name, value in values.items() if name.upper() in _ADDRESSES)
    return sorted({url for value in found if isinstance(value, str) and (url := _url(value))})


def _url(value: str) -> str | None:
    """Return a value of ``spec.env`` as a URL, or None. A proxy may lack its scheme."""
    url = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return url if is_whole else None


def _value(variable: EnvVarSpec) -> EnvValue:
    source = variable.value_from
    if source is None:
        return variable.value or ""
    if source.secret_key_ref is not None:
        return FromSecret(source.secret_key_ref.name, source.secret_key_ref.key)
    assert source.config_map_key_ref is not None, "a rule requires one of them"
    return FromConfigMap(source.config_map_key_ref.name, source.config_map_key_ref.key)


def _authorities(cache: RagCache) -> dict[str, EnvValue]:
    if cache.spec.trusted_ca is None:
        return {}
    return dict.fromkeys(_CA_VARIABLES, f"{_CA_FOLDER}/{_CA_FILE}")


def _proxies(proxy: ProxySpec | None) -> dict[str, EnvValue]:
    """Return each variable in both cases, because programs differ in which one they read."""
    given = {} if proxy is None else {"HTTP_PROXY": proxy.http, "HTTPS_PROXY": proxy.https}
    return {
        written: url
        for name, url in given.items()
        if url is not None
        for written in (name, name.lower())
    }


def _hosts_inside(cache: RagCache) -> Iterator[str]:
    """Yield the hosts of the spec's URLs that are Services of this namespace."""
    spec = cache.spec
    urls = [
        spec.telemetry.otlp and spec.telemetry.otlp.endpoint,
        spec.retriever.embedder.source,
        spec.retriever.reranker.source,
        *(engine.url for engine in spec.engines),
    ]
    for url in urls:
        host = urlsplit(url or "").hostname
        if host and "." not in host:
            yield host
