"""Installs the operator's chart into a cluster with Helm's library."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
from helm_python import HelmContext, HelmError, HelmValuesError

from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_core.errors import InvalidInput, RagCacheError, Unavailable

CHART = Path(__file__).resolve().parents[1] / "chart"
"""A link to charts/ragcache-operator in a checkout, a copy in an installed package."""

NAMESPACE = "ragcache-system"
RELEASE = "ragcache-operator"
_VALUE = re.compile(r"at '/?([^']*)': (.+)")
_OLD_CLUSTER = re.compile(r"requires kubeVersion: >=(\S+?)-0 .* Kubernetes (\S+)")
_FAILED_TEMPLATE = re.compile(r"execution error at \([^)]*\): (.+)")

Values = dict[str, Any]
Release = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed release. ``manifest`` has all its objects as YAML."""

    name: str
    namespace: str
    revision: int
    manifest: str
    notes: str
    was_there: bool


def read_values(files: Sequence[Path], settings: Sequence[str]) -> Values:
    """Merge values of files in order, then of ``KEY=VALUE`` settings.

    Raises:
        InvalidInput: A file or a setting is invalid; the error names it.
    """
    values: Values = {}
    for file in files:
        try:
            values = merged(values, helm_python.values_from_yaml(file.read_text()) or {})
        except OSError as error:
            raise InvalidInput("--values", f"{file}: {error.strerror}", "name a file") from error
        except (HelmError, UnicodeDecodeError) as error:
            raise InvalidInput(
                "--values", f"{file}: {error}", "write a YAML mapping of values"
            ) from error
    for setting in settings:
        try:
            values = merged(values, helm_python.parse_set_string(setting))
        except HelmError as error:
            raise InvalidInput(
                "--set", f"{setting!r}: {error}", "write it like replicas=1"
            ) from error
    return values


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Values:
    """Merge two mappings recursively; ``above`` wins."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


def install(
    choice: ClusterChoice,
    values: Values,
    *,
    wait_s: int | None = None,
    dry_run: bool = False,
    reset_values: bool = False,
) -> Installed:
    """Install or upgrade the chart, into NAMESPACE unless ``choice`` names a namespace.

    Args:
        values: Merged over the values of the installed release, unless ``reset_values``.
        wait_s: Longest wait until the operator is ready; None returns at once.
        dry_run: Validate with the cluster and change nothing.

    Raises:
        InvalidInput: The values or the cluster's name are invalid.
        Unavailable: The cluster does not answer.
        RagCacheError: Helm reported another error.
    """
    choice.demand_cluster()
    namespace = choice.namespace or NAMESPACE
    options: dict[str, Any] = {
        "namespace": namespace,
        "wait": "hookOnly" if wait_s is None else "watcher",
        "timeout": wait_s,
        "dry_run": "server" if dry_run else None,
    }
    try:
        with (
            HelmContext() as context,
            helm_python.Chart.load(CHART) as chart,
            helm_python.Config(
                kubeconfig_path=choice.kubeconfig,
                kube_context=choice.context,
                namespace=namespace,
            ) as config,
        ):
            _demand_valid(chart, values)
            config.check_reachable()
            before = _values_before(config)
            if before is None:
                done = _interruptible(
                    context,
                    lambda: config.install(
                        chart, RELEASE, values, context=context, create_namespace=True, **options
                    ),
                )
            else:
                kept = values if reset_values else merged(before, values)
                done = _interruptible(
                    context,
                    lambda: config.upgrade(
                        chart, RELEASE, kept, context=context, reset_values=True, **options
                    ),
                )
    except HelmError as error:
        raise _said_plainly(error, wait_s) from error
    return Installed(
        name=RELEASE,
        namespace=namespace,
        revision=int(done["revision"]),
        manifest=str(done.get("manifest", "")),
        notes=str(done.get("notes", "")),
        was_there=before is not None,
    )


def _values_before(config: helm_python.Config) -> Values | None:
    """Return the values of the installed release, or None without one."""
    try:
        return config.get_values(RELEASE) or {}
    except helm_python.HelmNotFoundError:
        return None


def _interruptible(context: HelmContext, action: Callable[[], Release]) -> Release:
    """Run a library call in a way that Ctrl-C ends, because the library ignores signals."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(action)
        try:
            return future.result()
        except KeyboardInterrupt:
            context.cancel()
            raise


def _demand_valid(chart: helm_python.Chart, values: Values) -> None:
    """Raise InvalidInput for the first value that the chart's schema refuses."""
    try:
        chart.validate_schema(values)
    except HelmValuesError as error:
        found = _VALUE.search(str(error))
        if found is None:
            raise
        path = found[1].replace("/", ".") or "values"
        fix = f"see {CHART / 'README.md'} for what can be set"
        raise InvalidInput(path, found[2], fix) from error


def _said_plainly(error: HelmError, wait_s: int | None) -> RagCacheError:
    """Translate an error of the library."""
    text = " ".join(str(error).split())
    template = _FAILED_TEMPLATE.search(text)
    if template is not None:
        return InvalidInput("--set/--values", template[1], "change these values")
    old = _OLD_CLUSTER.search(text)
    if old is not None:
        problem = f"it is Kubernetes {old[2]}, and RagCache needs {old[1]} or newer"
        return InvalidInput("cluster", problem, "upgrade the cluster, or choose another one")
    if isinstance(error, helm_python.HelmKubeError):
        return Unavailable("cluster", text)
    if wait_s is not None and "context deadline exceeded" in text:
        return Unavailable("operator", f"not ready after {wait_s} s: {text}")
    return RagCacheError(text)
