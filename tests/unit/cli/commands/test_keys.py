"""``ragcache keys``, and the commands and the file of docs/security.md."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache_cli.main import app
from ragcache_core.access.caller import Scope
from ragcache_core.access.key_file import KeyTable, hash_text, key_of
from ragcache_core.retrieval.filters import In
from ragcache_gateway.auth.api_keys import ApiKeys

GUIDE = (Path(__file__).parents[4] / "docs" / "security.md").read_text()
COMMANDS = re.findall(
    r"^(ragcache keys new .*?) >> keys\.toml$", GUIDE.replace("\\\n", ""), re.MULTILINE
)
FILTER = '{"must": [{"key": "public", "match": {"value": true}}]}'
EXAMPLE, QUOTAS = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)


def made_by(command: str) -> tuple[str, str]:
    """Run a command of the guide; return the entry and the key."""
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr.removeprefix("key: ").strip()


def test_the_commands_of_the_guide_make_a_file_that_lets_their_keys_in(tmp_path: Path) -> None:
    assert len(COMMANDS) == 4
    path = tmp_path / "keys.toml"
    keys = []
    for command in COMMANDS:
        entry, key = made_by(command)
        assert key not in entry
        keys.append(key)
        with path.open("a") as file:
            file.write(entry)
    app_caller, ingest, site, admin = (ApiKeys(path, KeyTable({})).find(key) for key in keys)
    assert app_caller is not None
    assert (app_caller.tenant, app_caller.scopes) == ("team-a", {Scope.ASK})
    assert ingest is not None
    assert ingest.scopes == {Scope.WRITE}
    assert site is not None
    assert (site.priority, site.collections) == (10, ("handbook", "public-*"))
    assert site.filter == In("public", ("true",))
    assert admin is not None
    assert admin.scopes == {Scope.ADMIN}


def test_the_command_of_the_guide_makes_the_entry_that_it_shows(tmp_path: Path) -> None:
    entry, key = made_by(COMMANDS[2])
    [made] = tomllib.loads(entry)["keys"]
    [shown] = tomllib.loads(EXAMPLE)["keys"]
    assert made == shown | {"hash": hash_text(key)}


def test_the_example_of_the_guide_is_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(EXAMPLE)
    assert ApiKeys(path, KeyTable({})).tenants() == frozenset()


def test_the_example_of_quotas_is_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(QUOTAS)
    assert ApiKeys(path, KeyTable({})).shares().weights == {"team-a": 2.0}


def test_limits_become_the_quota_of_the_entry() -> None:
    command = "ragcache keys new --name a --limit requests_per_day=5 --limit tokens_per_month=7"
    [made] = tomllib.loads(made_by(command)[0])["keys"]
    assert made["quota"] == {"requests_per_day": 5, "tokens_per_month": 7}


@pytest.mark.parametrize("limit", ["requests_per_day", "requests_per_day=-1", "x=1"])
def test_a_wrong_limit_is_refused(limit: str) -> None:
    result = CliRunner().invoke(app, ["keys", "new", "--name", "a", "--limit", limit])
    assert result.exit_code == 2
    assert "--limit" in result.stderr


def test_each_key_is_new() -> None:
    assert made_by(COMMANDS[0]) != made_by(COMMANDS[0])


def test_the_hash_of_a_key_is_printed() -> None:
    key = key_of(bytes(32))
    result = CliRunner().invoke(app, ["keys", "hash"], input=f"{key}\n")
    assert result.stdout.strip() == hash_text(key)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["keys", "new", "--name", "a", "--scopes", "root"], "--scopes"),
        (["keys", "new", "--name", "a b"], "name"),
        (["keys", "new", "--name", "a", "--collection", ""], "collections"),
        (["keys", "new", "--name", "a", "--scopes", "admin", "--collection", "b"], "collections"),
        (["keys", "new", "--name", "a", "--filter", "{"], "--filter"),
        (["keys", "new", "--name", "a", "--filter", "null"], "--filter"),
        (["keys", "new", "--name", "a", "--filter", "[" * 10_000], "--filter"),
        (["keys", "new", "--name", "a", "--filter", '{"must": [{"key": "b"}]}'], "filter"),
        (["keys", "new", "--name", "a", "--scopes", "write", "--filter", FILTER], "filter"),
        (["keys", "hash"], "key"),
    ],
)
def test_a_mistake_names_the_option(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, arguments, input="secret\n")
    assert result.exit_code == 2
    assert f"ragcache: {named}" in result.stderr
