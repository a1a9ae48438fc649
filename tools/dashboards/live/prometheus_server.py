"""A real Prometheus for the check: Debian's package, on loopback, with its data in a folder."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from harness.packages import Package, command, require
from harness.processes import free_port

PACKAGES: Final = (Package("prometheus", "prometheus"),)
SCRAPE_INTERVAL: Final = "1s"
RULE_INTERVAL: Final = "2s"
_START_LIMIT_S: Final = 30.0
_STEP_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """What Prometheus scrapes.

    Attributes:
        address: "host:port".
        labels: Labels of its series, as a PodMonitor sets them.
    """

    address: str
    labels: Mapping[str, str]


class PrometheusServer:
    """The HTTP API of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30.0, trust_env=False)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            return self._client.get("/-/ready").is_success
        except httpx.HTTPError:
            return False

    def values(self, expression: str, seconds: float) -> list[list[float]]:
        """Return the values of each series of a query over the last seconds.

        Raises:
            ValueError: Prometheus refuses the query.
        """
        now = time.time()
        span = {"start": now - seconds, "end": now, "step": _STEP_S}
        found = self._get("query_range", query=expression, **span)["result"]
        return [[float(value) for _, value in series["values"]] for series in found]

    def series(self, matcher: str) -> list[dict[str, str]]:
        """Return the labels of the series that match."""
        found: list[dict[str, str]] = self._get("series", **{"match[]": matcher})
        return found

    def exemplars(self, expression: str, seconds: float) -> list[dict[str, str]]:
        """Return the labels of the exemplars of the last seconds."""
        now = time.time()
        found = self._get("query_exemplars", query=expression, start=now - seconds, end=now)
        return [one["labels"] for series in found for one in series["exemplars"]]

    def rules(self) -> list[dict[str, Any]]:
        """Return all rules with their state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def targets(self) -> list[dict[str, Any]]:
        """Return the targets with their health."""
        found: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return found

    def _get(self, path: str, **parameters: Any) -> Any:
        reply = self._client.get(f"/api/v1/{path}", params=parameters).json()
        if reply["status"] != "success":
            raise ValueError(f"{reply['errorType']}: {reply['error']}")
        return reply["data"]


def check_rules(path: Path) -> list[str]:
    """Return what promtool finds wrong in a file of rules. Raises Unavailable without promtool."""
    done = subprocess.run(
        [command("promtool"), "check", "rules", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


@contextlib.contextmanager
def running_prometheus(
    folder: Path, targets: Sequence[Target], rules: Path
) -> Iterator[PrometheusServer]:
    """Run a Prometheus until the block ends.

    Raises:
        Unavailable: The package is not installed.
    """
    require(PACKAGES)
    config = {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": RULE_INTERVAL},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "ragcache",
                "scrape_timeout": SCRAPE_INTERVAL,
                "static_configs": [
                    {"targets": [one.address], "labels": dict(one.labels)} for one in targets
                ],
            }
        ],
    }
    folder.mkdir(parents=True)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    arguments = (
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    )
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [command("prometheus"), *arguments], stdout=log, stderr=subprocess.STDOUT
        )
    server = PrometheusServer(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + _START_LIMIT_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Prometheus did not start:\n{(folder / 'log').read_text()}")
            time.sleep(0.1)
        yield server
    finally:
        server.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
