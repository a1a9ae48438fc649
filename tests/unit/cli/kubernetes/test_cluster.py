"""Commands about a cluster: which one is meant, what they show, how logs are read."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ragcache_cli.kubernetes.cluster import pick
from ragcache_cli.kubernetes.cluster_choice import ClusterChoice, is_meant_here
from ragcache_cli.kubernetes.cluster_views import (
    conditions_table,
    describe_use,
    headline,
    is_ready,
    notes,
    parts_table,
    remake_lines,
)
from ragcache_cli.kubernetes.install import CHART, merged, read_values
from ragcache_cli.kubernetes.pod_logs import Run, is_meant, runs, timestamp, waits_for
from ragcache_cli.local.log_files import choose, find_logs, last_lines, show_files
from ragcache_cli.output.logs import LogLines, is_of, read_words
from ragcache_core.errors import InvalidInput, NotFound

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
CLUSTER = ClusterChoice(namespace="team")

Object = dict[str, Any]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine that knows of no cluster."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def shown(*tables: Any) -> list[str]:
    """Lines of what a console shows."""
    console = Console(file=io.StringIO(), width=200)
    for table in tables:
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def rag_cache(generation: int = 1, **status: Any) -> Object:
    return {
        "metadata": {"name": "docs", "namespace": "team", "generation": generation},
        "status": status,
    }


def condition(name: str, status: str, reason: str, message: str) -> Object:
    since = (NOW - timedelta(minutes=3, seconds=2)).isoformat().replace("+00:00", "Z")
    return {
        "type": name,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": since,
    }


ROLLING = rag_cache(
    phase="Progressing",
    observedGeneration=1,
    progress="engine: engine-main-0: loading model",
    model="tinyrag",
    endpoints={"gateway": "http://docs-gateway.team.svc:8080"},
    gateway={"replicas": 2, "readyReplicas": 2},
    engines=[{"name": "main", "replicas": 2, "readyReplicas": 1}],
    cacheStore={"shards": 3, "readyShards": 3},
    conditions=[
        condition("Accepted", "True", "Valid", "the spec is valid"),
        condition("Ready", "False", "RollingOut", "engine: 1 of 2\x1b[31m"),
    ],
    cache={"bytes": 12_345_678, "hitRate": "0.83"},
)


def test_a_cluster_is_meant_when_one_is_named() -> None:
    assert not is_meant_here(CLUSTER, None, None, here=["docs"])
    assert not is_meant_here(ClusterChoice(context="prod"), "docs", None, here=["docs"])
    with pytest.raises(InvalidInput, match="--data: is of this machine"):
        is_meant_here(CLUSTER, None, Path("data"), here=[])


def test_this_machine_is_meant_when_something_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").touch()
    known = ClusterChoice(kubeconfig=None)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert known.is_configured
    assert is_meant_here(known, None, None, here=["docs"])
    assert is_meant_here(known, "docs", None, here=["docs"])
    assert is_meant_here(known, None, Path("data"), here=[])
    assert not is_meant_here(known, "other", None, here=["docs"])
    assert not is_meant_here(known, None, None, here=[])


def test_this_machine_is_meant_when_there_is_no_cluster() -> None:
    assert is_meant_here(ClusterChoice(), None, None, here=[])
    assert is_meant_here(ClusterChoice(), "docs", None, here=[])
    with pytest.raises(InvalidInput, match=r"--kubeconfig: there is no .*/\.kube/config; name a"):
        ClusterChoice(namespace="team").demand_cluster()


def test_the_only_rag_cache_needs_no_name() -> None:
    docs, wiki = rag_cache(), rag_cache()
    wiki["metadata"] = {**wiki["metadata"], "name": "wiki"}
    assert pick([docs], None, "team") is docs
    assert pick([docs, wiki], "wiki", "team") is wiki
    with pytest.raises(InvalidInput, match="NAME: could be any of docs, wiki; say which"):
        pick([wiki, docs], None, "team")
    with pytest.raises(InvalidInput, match="there is no RagCache in namespace team"):
        pick([], None, "team")
    with pytest.raises(NotFound, match="'x' does not exist; there is docs, wiki in namespace"):
        pick([docs, wiki], "x", "team")


def test_a_status_tells_phase_parts_conditions_and_use() -> None:
    assert headline(ROLLING) == (
        "docs in namespace team: Progressing; tinyrag at http://docs-gateway.team.svc:8080"
    )
    assert notes(ROLLING) == ["waiting for engine: engine-main-0: loading model"]
    assert shown(parts_table(ROLLING)) == [
        "PART READY",
        "gateway 2/2",
        "engine-main 1/2",
        "cachestore 3/3",
    ]
    assert shown(conditions_table(ROLLING, NOW)) == [
        "CONDITION STATUS SINCE REASON MESSAGE",
        "Accepted True 3m 2s Valid the spec is valid",
        "Ready False 3m 2s RollingOut engine: 1 of 2[31m",
    ]
    assert describe_use(ROLLING) == "12.3 MB; 83% of reads hit"
    assert not is_ready(ROLLING)


def test_a_status_tells_remakes_of_the_retriever() -> None:
    cache = rag_cache(
        retriever={
            "replicas": 3,
            "readyReplicas": 1,
            "remakeProgress": "12 of 40",
            "remakes": [
                {
                    "collection": "handbook\x1b[31m",
                    "documentsDone": 12,
                    "documents": 1040,
                    "reason": "embedder",
                }
            ],
        }
    )
    assert "retriever 1/3" in shown(parts_table(cache))
    assert remake_lines(cache) == ["remake of handbook[31m: 12 of 1,040 documents (embedder)"]
    without = rag_cache(phase="Ready")
    assert remake_lines(without) == []


def test_a_status_that_lags_is_no_ready_one() -> None:
    answering = [condition("Ready", "True", "Answering", "the gateway answers questions")]
    assert is_ready(rag_cache(phase="Ready", observedGeneration=1, conditions=answering))
    lagging = rag_cache(2, phase="Ready", observedGeneration=1, conditions=answering)
    assert not is_ready(lagging)
    assert notes(lagging) == ["the operator has not seen the last change of its spec yet"]


def test_without_an_operator_there_is_no_status() -> None:
    unseen = {"metadata": {"name": "docs", "namespace": "team", "generation": 1}}
    assert headline(unseen) == (
        "docs in namespace team: no operator has looked at it yet; `ragcache install` installs one"
    )
    assert parts_table(unseen) is None
    assert conditions_table(unseen, NOW) is None
    assert notes(unseen) == []
    refused = rag_cache(
        phase="Refused",
        observedGeneration=1,
        progress="",
        conditions=[
            condition("Ready", "False", "Invalid", "spec.model.source: is empty; name one")
        ],
    )
    assert headline(refused) == "docs in namespace team: Refused"
    assert parts_table(refused) is None
    assert describe_use(refused) == "not measured yet"


def test_words_name_a_rag_cache_a_part_or_both() -> None:
    assert read_words(None, None, ["docs"]) == (None, None)
    assert read_words("docs", None, ["docs"]) == ("docs", None)
    assert read_words("docs", "engine", ["docs"]) == ("docs", "engine")
    assert read_words("engine", None, ["docs"]) == (None, "engine")
    assert read_words("engine-main", None, []) == (None, "engine-main")
    # A RagCache may have the name of a part.
    assert read_words("gateway", None, ["gateway"]) == ("gateway", None)
    with pytest.raises(NotFound, match="part 'b' does not exist; the parts are gateway"):
        read_words("docs", "b", ["docs"])


def test_a_component_takes_in_all_its_engines() -> None:
    assert is_of("engine-main", "engine")
    assert is_of("engine-main", "engine-main")
    assert not is_of("engine-main", "engine-ma")
    assert not is_of("gateway", "engine")
    assert is_of("gateway", None)


def test_lines_come_behind_their_source_and_steer_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=20)
    lines = LogLines(console)
    lines.show("gateway", "[bold]a long line that is not folded\x1b[2J")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text == "gateway | [bold]a long line that is not folded[2J\n"


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"))),
    st.integers(0, 9),
)
def test_the_last_lines_of_a_file_are_its_last_lines(lines: list[str], count: int) -> None:
    file = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    assert last_lines(file, count) == (lines[-count:] if count else [])
    assert file.read() == b""


def test_the_last_lines_of_a_large_file() -> None:
    lines = [f"{number} {'x' * 1000}" for number in range(500)]
    file = io.BytesIO("\n".join(lines).encode())
    assert last_lines(file, 200) == lines[-200:]


def logs_of(root: Path, name: str, *parts: str) -> Path:
    folder = root / name / "logs"
    folder.mkdir(parents=True)
    for part in parts:
        (folder / f"{part}.log").write_text(f"{part} starts\n{part} runs\n")
    return root / name


def test_logs_are_found_by_name_folder_or_being_the_only_ones(tmp_path: Path) -> None:
    data = logs_of(tmp_path, "docs", "gateway", "engine-main", "engine-main.previous")
    assert {*find_logs(None, None, tmp_path)} == {"gateway", "engine-main"}
    assert find_logs("docs", None, tmp_path) == find_logs(None, data, tmp_path)
    logs_of(tmp_path, "wiki", "gateway")
    with pytest.raises(InvalidInput, match="NAME: could be any of docs, wiki"):
        find_logs(None, None, tmp_path)
    # What runs goes before what ran.
    (data / "state.json").touch()
    assert find_logs(None, None, tmp_path) == find_logs("docs", None, tmp_path)
    with pytest.raises(NotFound, match="RagCache 'x' does not exist; what ran here is docs"):
        find_logs("x", None, tmp_path)
    with pytest.raises(InvalidInput, match="--data: nothing has run in"):
        find_logs(None, None, tmp_path / "other")
    with pytest.raises(InvalidInput, match="holds no logs"):
        find_logs(None, tmp_path / "other", tmp_path)


async def test_the_logs_of_a_component_alone(tmp_path: Path) -> None:
    files = find_logs(None, logs_of(tmp_path, "docs", "gateway", "engine-a", "engine-b"))
    assert {*choose(files, "engine")} == {"engine-a", "engine-b"}
    with pytest.raises(NotFound, match="part 'retriever' does not exist; the parts here are"):
        choose(files, "retriever")
    seen: list[tuple[str, str]] = []
    await show_files(choose(files, "gateway"), 1, lambda *line: seen.append(line), follow=False)
    assert seen == [("gateway", "gateway runs")]


def pod(*containers: Object, **labels: str) -> Object:
    return {
        "metadata": {"name": "docs-engine-main-0", "namespace": "team", "labels": labels},
        "status": {"phase": "Pending", "containerStatuses": list(containers)},
    }


def test_a_container_has_a_log_once_it_has_started() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    running = {"name": "engine", "restartCount": 0, "state": {"running": {}}}
    tried = {"name": "engine", "restartCount": 2, "state": waiting}
    ended = {"name": "engine", "restartCount": 0, "state": {"terminated": {}}}
    new = {"name": "engine", "restartCount": 0, "state": waiting}
    assert list(runs(pod(running))) == [Run("team", "docs-engine-main-0", "engine", 0)]
    assert list(runs(pod(tried))) == [Run("team", "docs-engine-main-0", "engine", 2)]
    assert len(list(runs(pod(ended)))) == 1
    assert list(runs(pod(new))) == []
    assert waits_for(pod(new)) == "ImagePullBackOff: no such image"
    assert waits_for(pod()) == "Pending"
    unscheduled = pod()
    unscheduled["status"]["conditions"] = [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/1 nodes are available",
        }
    ]
    assert waits_for(unscheduled) == "Unschedulable: 0/1 nodes are available"


def test_a_colocated_shard_is_chosen_by_its_container() -> None:
    running: list[Object] = [
        {"name": name, "restartCount": 0, "state": {"running": {}}}
        for name in ("engine", "cachestore")
    ]
    both = pod(*running, **{"app.kubernetes.io/component": "engine"})
    both["spec"] = {"containers": [{"name": one["name"]} for one in running]}
    chosen = {
        part: [run.container for run in runs(both, part)]
        for part in (None, "engine", "cachestore", "gateway")
        if is_meant(both, part)
    }
    assert chosen == {
        None: ["engine", "cachestore"],
        "engine": ["engine"],
        "cachestore": ["cachestore"],
    }


def test_pods_are_chosen_by_component_or_by_engine() -> None:
    labels = {"app.kubernetes.io/component": "engine", "ragcache.dev/engine": "main"}
    engine = pod(**labels)
    assert [
        w for w in (None, "engine", "engine-main", "engine-x", "gateway") if is_meant(engine, w)
    ] == [
        None,
        "engine",
        "engine-main",
    ]


@given(st.datetimes(), st.datetimes())
def test_timestamps_compare_as_times_do(one: datetime, other: datetime) -> None:
    def stamp(time: datetime) -> str:
        # As Go writes it: without the zeros at the fraction's end.
        return f"{time:%Y-%m-%dT%H:%M:%S}.{time:%f}".rstrip("0").rstrip(".") + "Z"

    one, other = (time.replace(year=2000 + time.year % 100) for time in (one, other))
    assert (timestamp(stamp(one)) < timestamp(stamp(other))) == (one < other)


def test_values_of_files_and_settings_are_merged_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("image: {tag: a, repository: r}\nreplicas: 1\n")
    second.write_text("image: {tag: b}\n")
    values = read_values([first, second], ["replicas=3", "watch.namespaces={x,y}"])
    assert values == {
        "image": {"tag": "b", "repository": "r"},
        "replicas": 3,
        "watch": {"namespaces": ["x", "y"]},
    }
    assert merged({"a": {"b": 1}}, {"a": None}) == {"a": None}
    with pytest.raises(InvalidInput, match=r"--values: .*none\.yaml: No such file"):
        read_values([tmp_path / "none.yaml"], [])
    with pytest.raises(
        InvalidInput, match=r"--set: 'replicas': key .* has no value; write it like"
    ):
        read_values([], ["replicas"])
    first.write_text("- a list")
    with pytest.raises(InvalidInput, match=r"--values: .*a\.yaml: .*; write a YAML mapping"):
        read_values([first], [])


def test_the_chart_comes_with_the_command() -> None:
    assert (CHART / "Chart.yaml").is_file()
    assert CHART.resolve() == Path(__file__).parents[4] / "charts" / "ragcache-operator"
