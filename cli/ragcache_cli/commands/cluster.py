"""``ragcache install`` and ``ragcache render``: the operator in a cluster, and what it creates."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from ragcache_cli.commands.options import (
    ClusterOptions,
    ContextOption,
    KubeconfigOption,
    ManifestOption,
    OutputOption,
    grouped,
)
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice
from ragcache_cli.kubernetes.render import capabilities_of, objects, render_yaml
from ragcache_cli.output.console import print_json
from ragcache_core.errors import InvalidInput
from ragcache_operator.builders.capabilities import Capabilities, unsupported_features
from ragcache_operator.spec.manifest import load_manifest


@dataclass(frozen=True, slots=True)
class OperatorCluster(ClusterOptions):
    """The cluster and the namespace of the operator."""

    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Namespace of the operator.",
            show_default="ragcache-system",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ChartValues:
    """The values of the operator's chart."""

    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value of the chart; may be repeated."),
    ] = None
    values: Annotated[
        list[Path] | None,
        typer.Option("--values", metavar="FILE", help="Values of the chart; may be repeated."),
    ] = None
    reset_values: Annotated[
        bool, typer.Option("--reset-values", help="Discard the values of earlier installs.")
    ] = False


@grouped
def install_command(
    chart: ChartValues,
    cluster: OperatorCluster,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the operator is ready.")] = False,
    timeout: Annotated[
        int, typer.Option("--timeout", metavar="SECONDS", min=1, help="How long to wait.")
    ] = 300,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the objects, and change nothing.")
    ] = False,
    output: OutputOption = "text",
) -> None:
    """Install or upgrade the operator in a cluster; the helm command is not needed."""
    try:
        from ragcache_cli.kubernetes import install as installing  # noqa: PLC0415  slow to import
    except ModuleNotFoundError as error:
        if error.name != "helm_python":
            raise
        raise InvalidInput(
            "install",
            "Helm's library is not installed",
            "run pip install '.[install]' in the folder of the repository",
        ) from error

    done = installing.install(
        cluster.choice,
        installing.read_values(chart.values or (), chart.settings or ()),
        wait_s=timeout if wait else None,
        dry_run=dry_run,
        reset_values=chart.reset_values,
    )
    if output == "json":
        print_json(asdict(done))
        return
    if dry_run:
        print(done.manifest, end="")
        return
    verb = "upgraded" if done.was_there else "installed"
    print(f"{verb} {done.name} in namespace {done.namespace} (revision {done.revision})")
    print(f"\n{done.notes.strip()}")


def render_command(
    file: ManifestOption,
    kube_version: Annotated[
        str | None,
        typer.Option(
            "--kube-version",
            metavar="VERSION",
            help="Render for a cluster of this version without optional APIs.",
            show_default="a current one with everything on it",
        ),
    ] = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[
        Literal["yaml", "json"], typer.Option("--output", "-o", help="Form of the objects.")
    ] = "yaml",
) -> None:
    """Print the Kubernetes objects that the operator would create for a RagCache."""
    cache = load_manifest(file)
    choice = ClusterChoice(kubeconfig, context)
    if choice.is_given and kube_version is not None:
        raise InvalidInput("--kube-version", "is given beside a cluster", "leave one of them out")
    capabilities = capabilities_of(kube_version) if kube_version is not None else None
    if choice.is_given:
        from ragcache_cli.kubernetes.cluster import capabilities_at  # noqa: PLC0415  slow to import

        capabilities = asyncio.run(capabilities_at(choice))
    for refusal in unsupported_features(cache, capabilities or Capabilities.latest()):
        print(f"ragcache: left out: {refusal.message}", file=sys.stderr)
    if output == "json":
        print_json({"apiVersion": "v1", "kind": "List", "items": objects(cache, capabilities)})
        return
    print(render_yaml(cache, capabilities), end="")
