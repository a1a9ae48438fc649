"""Each command, manifest and program in the documentation is one that a reader can run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
import yaml
from typer.testing import CliRunner

from ragcache_cli.main import app
from ragcache_core.access.key_file import parse_key_file
from tests.kit.documentation import (
    ROOT,
    Block,
    Command,
    RunBy,
    all_blocks,
    all_commands,
    commands,
    run_by,
    tracked,
    write_reader_folder,
)
from tests.unit.docs.command_checks import (
    CRDS,
    Wrong,
    check,
    check_body,
    check_object,
    crd_spec,
    has_field,
    parse_arguments,
)

KINDS: Final = {"shell", "yaml", "json", "toml", "python", "text", "inline"}


def of_kind(kind: str) -> list[Block]:
    return [block for block in all_blocks() if block.kind == kind]


def problems(found: Iterable[Command]) -> list[str]:
    broken = []
    for command in found:
        try:
            check(command)
        except Wrong as error:
            broken.append(f"{command}\n    {error}")
    return broken


def test_every_command_can_be_run() -> None:
    found = all_commands()
    assert len(found) > 100
    assert not (broken := problems(found)), "\n".join(broken)


def test_every_block_has_a_known_kind() -> None:
    unknown = [
        f"{block.position}: {block.kind or 'name the language of this block'}"
        for block in all_blocks()
        if block.kind not in KINDS and not (block.kind == "" and any(c in block.text for c in "─▶"))
    ]
    assert unknown == []


def test_every_manifest_is_valid() -> None:
    for block in of_kind("yaml"):
        for manifest in yaml.safe_load_all(block.text):
            check_object(manifest)


def test_every_json_block_is_a_search() -> None:
    for block in of_kind("json"):
        check_body("/v1/search", json.loads(block.text))


def test_every_toml_block_is_a_file_of_keys() -> None:
    for block in of_kind("toml"):
        assert "keys" in tomllib.loads(block.text)
        assert parse_key_file(block.text.encode(), lambda path, value: value).callers


def test_python_compiles() -> None:
    for block in of_kind("python"):
        compile(block.text, block.position, "exec")


RAGCACHE: Final = sorted(
    {command.words[1:] for command in all_commands() if command.words[0] == "ragcache"}
)
ALONE: Final = [words for words in RAGCACHE if run_by(words) is RunBy.ALONE]


def test_each_ragcache_command_is_run_by_a_test() -> None:
    by_test = {way: [words for words in RAGCACHE if run_by(words) is way] for way in RunBy}
    assert all(len(found) > 10 for found in by_test.values()), by_test
    with pytest.raises(KeyError):
        run_by(("dance",))


@pytest.fixture
def reader_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_reader_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("reader_folder")
@pytest.mark.parametrize("words", ALONE, ids=shlex.join)
def test_commands_without_a_platform_run(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(words))
    # A machine may lack something, which `doctor` then names.
    assert result.exit_code in ({0, 1} if words[0] == "doctor" else {0}), result.output
    assert result.output


def test_sessions_show_what_commands_print(reader_folder: Path) -> None:
    sessions = [
        (command, block.text)
        for block in of_kind("shell")
        if block.text.startswith("$ ragcache ")
        for command in commands(block)[:1]
        if run_by(command.words[1:]) is RunBy.ALONE
    ]
    assert sessions
    for command, text in sessions:
        result = CliRunner().invoke(app, list(command.words[1:]))
        printed = [line.rstrip() for line in result.output.splitlines()]
        assert printed == text.splitlines()[1:], str(command)


def test_make_help_lists_the_targets() -> None:
    environment = {**os.environ, "MAKEFLAGS": ""}
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert {"demo", "docs", "test", "bench"} <= {line.split()[0] for line in listed.splitlines()}


@pytest.mark.parametrize(
    "line",
    [
        "ragcache up --file",
        "ragcache up --fiel examples/quickstart.yaml",
        "ragcache collection push handbook",
        "make dmeo",
        "make demo DOKS=x",
        "python -m bench.no_such_benchmark --quick",
        "python -m bench.soak --quik",
        "kubectl apply -f examples/no-such-file.yaml",
        "kubectl get ragcash",
        "kubectl get ragcache x -o jsonpath='{.status.noSuchField}'",
        "kubectl wait ragcache/x --for=condition=Readdy",
        "kubectl port-forward service/x-gateway 8091",
        """kubectl patch ragcache x --type merge -p '{"spec": {"gatway": {}}}'""",
        "helm install x charts/no-such-chart",
        "helm install x charts/ragcache-operator --set imagee.tag=1",
        "curl localhost:8080/v1/chats",
        "curl -X PUT localhost:8080/v1/search",
        """curl localhost:8080/v1/search -H 'Content-Type: application/json' -d '{"quary": 1}'""",
        "docker build --target no-such-target .",
        "for image in gateway nothing; do docker build --target $image .; done",
        "pip install '.[nothing]'",
        'export RAGCACHE_API_KEY="$(kubectl get sekret x)"',
        "unknown-program",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    block = Block("page.md", 1, "shell", line + "\n")
    assert problems(commands(block)), line


def test_shell_lines_are_split_as_a_shell_splits_them() -> None:
    text = """\
make setup && source .venv/bin/activate   # the reader's environment
ragcache status NAME; ragcache logs NAME engine
A=1 ragcache keys new --name x >> keys.toml &
export X="$(kubectl get secret "$(kubectl get ragcache q -o name)" | base64 -d)"
curl localhost/v1/search \\
  -d '{
  "query": "a; b"
}'
"""
    words = [command.words for command in commands(Block("page.md", 1, "shell", text))]
    assert [found[0] for found in words] == [
        *("make", "source", "ragcache", "ragcache", "ragcache"),
        *("kubectl", "kubectl", "base64", "export", "curl"),
    ]
    assert words[4] == ("ragcache", "keys", "new", "--name", "x")
    assert json.loads(words[-1][-1]) == {"query": "a; b"}


def test_console_blocks_contain_output() -> None:
    block = Block("page.md", 1, "shell", "$ make help\n  setup  make .venv\n$ ragcache --help\n")
    assert [command.words for command in commands(block)] == [
        ("make", "help"),
        ("ragcache", "--help"),
    ]


def test_an_open_quotation_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not end"):
        commands(Block("page.md", 1, "shell", "curl -d '{\n"))


def test_arguments_are_those_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--rounds', type=int)\n"
        "parser.add_argument('--quick', action='store_true')\n"
    )
    parse_arguments(script, ["--quick", "--rounds", "3"])
    for wrong in (["--slow"], ["--rounds", "many"]):
        with pytest.raises(Wrong):
            parse_arguments(script, wrong)


FOLDERS: Final = (
    *("core/", "wire/", "kv/", "services/", "operator/", "cli/", "bench/", "tools/", "tests/"),
    *("charts/", "crds/", "docs/", "examples/", "models/"),
)


NO_FIELDS: Final = {
    "spec.reuse.maxRecompute": "a name of an earlier release, in docs/upgrade.md",
    "networkPolicy.metricsFrom": "a value of the chart, in docs/install.md",
    "tls.crt": "a file of a certificate",
    "tls.key": "a file of a certificate",
}
"""What looks like a field of a RagCache, and what it is."""


def test_paths_in_sentences_exist() -> None:
    missing = [
        f"{block.position}: {block.text}"
        for block in of_kind("inline")
        if block.text.startswith(FOLDERS)
        and re.fullmatch(r"[\w./-]+", block.text)
        and "docs/adr" not in block.page  # decisions keep the names of their day
        and not (ROOT / block.text).exists()
    ]
    assert missing == []


def test_fields_in_sentences_are_in_the_crds() -> None:
    specs = [crd_spec(crd) for crd in CRDS]
    pattern = re.compile(r"(spec\.)?((?:\w+(?:\[\])?\.)*\w+(?:\[\])?)")
    unknown = []
    for block in of_kind("inline"):
        match = pattern.fullmatch(block.text.partition(":")[0])
        if match is None or "docs/adr" in block.page or "charts/" in block.page:
            continue
        path = match[2].replace("[]", "").split(".")
        is_field = match[1] is not None or (len(path) > 1 and path[0] in specs[0]["properties"])
        if (
            is_field
            and block.text not in NO_FIELDS
            and not any(has_field(spec, path) for spec in specs)
        ):
            unknown.append(f"{block.position}: {block.text}")
    assert unknown == []


def test_metrics_in_sentences_exist() -> None:
    folders = ("services", "wire", "core", "kv", "operator")
    files = tracked(*(f"{folder}/*.py" for folder in folders))
    assert len(files) > 300
    sources = "".join(path.read_text() for path in files).replace(".", "_")
    unknown = []
    for block in of_kind("inline"):
        match = re.fullmatch(r"ragcache_(?:gateway|engine)_(\w+)", block.text)
        if match is None or "docs/adr" in block.page:
            continue
        name = match[1].removesuffix("_total")
        without_unit = re.sub(r"_(seconds|bytes|ratio|bucket)$", "", name)
        if name not in sources and without_unit not in sources:
            unknown.append(f"{block.position}: {block.text}")
    assert unknown == []
