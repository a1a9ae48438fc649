"""Checks of commands in the documentation: each with the parser or the files that it is for."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import typer
import typer.main
import yaml
from fastapi import FastAPI
from pydantic import BaseModel

from ragcache_cli.main import app as cli
from ragcache_gateway.chat.schema import ChatRequest
from ragcache_gateway.documents.schema import DocumentIn
from ragcache_gateway.documents.search_schema import SearchRequest
from ragcache_gateway.http.openapi import describe
from ragcache_gateway.http.routes import (
    backup_routes,
    chat_routes,
    collection_routes,
    document_routes,
    embedding_routes,
    response_routes,
    search_routes,
    status_routes,
)
from ragcache_operator.spec.manifest import parse, parse_manifest
from ragcache_operator.spec.ragcache import KIND
from ragcache_operator.spec.values import API_VERSION
from ragcache_operator.status import component, conditions
from tests.kit.documentation import ROOT, SUBSTITUTED, Command

MAKEFILE: Final = (ROOT / "Makefile").read_text()
CRDS: Final = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
KINDS: Final = {
    name
    for crd in CRDS
    for names in [crd["spec"]["names"]]
    for name in (names["plural"], names["singular"], *names["shortNames"])
} | {
    "crd",
    "deployment",
    "events",
    "lease",
    "namespace",
    "node",
    "pod",
    "pods",
    "pvc",
    "secret",
    "secrets",
    "service",
    "statefulset",
}
CONDITIONS: Final = {
    *(conditions.READY, conditions.ACCEPTED, conditions.SELF_TEST, conditions.BLEND_VERIFIED),
    *component.CONDITION_OF.values(),
}
ROUTES: Final = (
    backup_routes,
    chat_routes,
    collection_routes,
    document_routes,
    embedding_routes,
    response_routes,
    search_routes,
    status_routes,
)
BODIES: Final[dict[str, type[BaseModel]]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/documents": DocumentIn,
    "/v1/search": SearchRequest,
}
_PLACEHOLDER: Final = re.compile(r"\b[A-Z]{2,}\b|^\.\.\.$")
"""A word in capitals stands for the reader's own value."""


class Wrong(AssertionError):
    """A command that a reader could not run."""


def expect(holds: object, problem: str) -> None:
    """Raise Wrong with the problem unless it holds."""
    if not holds:
        raise Wrong(problem)


def check_ragcache(words: Sequence[str]) -> None:
    """Parse a ``ragcache`` command with the command's own parser."""
    command: Any = typer.main.get_command(cli)
    name, rest, parent = "ragcache", list(words), None
    while hasattr(command, "commands"):
        if not rest:
            return
        context = command.make_context(
            name, rest, parent=parent, resilient_parsing="--help" in rest
        )
        left = [*getattr(context, "_protected_args", ()), *context.args]
        if rest == ["--help"]:
            return
        name, command, rest = command.resolve_command(context, left)
        parent = context
    command.make_context(name, rest, parent=parent, resilient_parsing="--help" in rest)


def check_make(words: Sequence[str]) -> None:
    """The targets are in the Makefile, and so are the variables."""
    for word in words:
        variable, is_variable, _ = word.partition("=")
        if is_variable:
            expect(re.search(rf"^{variable} \?=", MAKEFILE, re.M), f"no variable {variable}")
        else:
            expect(re.search(rf"^{word}:", MAKEFILE, re.M), f"no target {word}")


def check_python(words: Sequence[str]) -> None:
    """The module or script exists, and its parser accepts the arguments."""
    expect(words, "names no module")
    if words[0] == "-m":
        module, arguments = words[1], words[2:]
        if module in {"venv", "pip"}:
            return
        if module == "pytest":
            paths = [word for word in arguments if "/" in word]
            expect(all((ROOT / word).exists() for word in paths), "a path does not exist")
            return
        found = importlib.util.find_spec(module)
        expect(found is not None and found.origin is not None, f"no module {module}")
        assert found is not None
        assert found.origin is not None
        source = Path(found.origin)
        if source.name == "__init__.py":
            source = source.with_name("__main__.py")
    else:
        source, arguments = ROOT / words[0], words[1:]
    expect(source.is_file(), f"no file {source}")
    parse_arguments(source, arguments)


_QUICK: Final = {"options", "is_quick"}
"""Functions of ``bench.support.program`` that add ``--quick``."""


def parse_arguments(source: Path, arguments: Sequence[str]) -> None:
    """Parse arguments as a script declares them, without running the script.

    A benchmark imports vLLM or torch, so the parser is made from its ``add_argument`` calls.
    """
    parser = argparse.ArgumentParser(prog=source.name, exit_on_error=False)
    tree = ast.parse(source.read_text())
    short_names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_add_argument(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in _QUICK:
            parser.add_argument("--quick", action="store_true")
            continue
        is_short = isinstance(node.func, ast.Name) and node.func.id in short_names
        if not is_short and not _is_add_argument(node.func):
            continue
        names = [ast.literal_eval(name) for name in node.args]
        options = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in node.keywords
            if keyword.arg in {"action", "nargs", "const", "dest"}
        }
        kind = next((key.value for key in node.keywords if key.arg == "type"), None)
        if isinstance(kind, ast.Name) and kind.id in {"int", "float"}:
            options["type"] = {"int": int, "float": float}[kind.id]
        parser.add_argument(*names, **options)
    try:
        _, left = parser.parse_known_args(arguments)
    except (argparse.ArgumentError, SystemExit) as error:
        raise Wrong(f"{source.name} refuses its arguments: {error}") from error
    expect(not left, f"{source.name} has no argument {left}")


def _is_add_argument(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "add_argument"


_WITH_VALUE: Final = {
    *("-f", "-n", "--namespace", "-l", "-o", "-p"),
    *("--type", "--for", "--timeout", "--raw"),
}
"""Options of kubectl that have a value."""


def check_kubectl(words: Sequence[str]) -> None:
    """Files validate, kinds are known, and paths in RagCaches exist in the CRD."""
    verb, *rest = words
    if verb == "ragcache":
        check_ragcache(rest)
        return
    flags, plain = _flags(rest, _WITH_VALUE)
    if flags.get("--raw"):
        expect(not plain, f"names {plain} besides a path")
        return
    _check_options(flags, plain)
    if verb == "port-forward":
        service, *ports = plain
        expect(service.startswith("service/") and service.endswith("-gateway"), f"no {service}")
        gateway = parse_manifest(minimal()).spec.gateway
        for port in ports:
            target = int(port.rpartition(":")[2])
            expect(target in {gateway.port, gateway.admin_port}, f"no port {target}")
    elif verb in {"get", "describe", "delete", "wait", "patch", "scale", "edit"}:
        kinds = plain[0].partition("/")[0].split(",") if plain else ()
        expect(plain or "-f" in flags, "names nothing")
        expect(set(kinds) <= KINDS, f"unknown kinds in {kinds}")
    elif verb == "rollout":
        expect(plain[0] == "restart" and plain[1].partition("/")[0] in KINDS, f"rollout {plain}")
    elif verb == "explain":
        expect(plain[0].partition(".")[0] in KINDS, f"unknown kind in {plain}")
    else:
        expect(verb in {"apply", "create"}, f"kubectl {verb} has no check")


def _check_options(flags: Mapping[str, Sequence[str]], plain: Sequence[str]) -> None:
    """Files and patches are valid; conditions and fields of the status exist."""
    for file in flags.get("-f", ()):
        check_manifests(ROOT / file)
    for json_path in flags.get("-o", ()):
        if json_path.startswith("jsonpath={.status.") and "ragcache" in plain:
            field = json_path.removeprefix("jsonpath={.status.").removesuffix("}")
            expect(field in _status_fields(), f"a RagCache has no status.{field}")
    for wanted in flags.get("--for", ()):
        condition = wanted.removeprefix("condition=")
        expect(condition in CONDITIONS, f"no condition {condition}")
    for patch in flags.get("-p", ()):
        parse_manifest({**minimal(), **json.loads(patch)})


def _status_fields() -> set[str]:
    (crd,) = (crd for crd in CRDS if crd["spec"]["names"]["kind"] == KIND)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return set(schema["properties"]["status"]["properties"])


def crd_spec(crd: dict[str, Any]) -> dict[str, Any]:
    """The schema of a CRD's spec."""
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec: dict[str, Any] = schema["properties"]["spec"]
    return spec


def has_field(schema: dict[str, Any], path: Sequence[str]) -> bool:
    """Whether a schema has a field; lists are passed through."""
    for name in path:
        schema = schema.get("items", schema)
        if name not in schema.get("properties", {}):
            return False
        schema = schema["properties"][name]
    return True


def minimal() -> dict[str, Any]:
    """The smallest manifest of a RagCache."""
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "shown"}}


def check_manifests(path: Path) -> None:
    """The file exists, and the objects of this project in it are valid."""
    if _PLACEHOLDER.search(path.name):
        return
    expect(path.is_file(), f"no file {path.relative_to(ROOT)}")
    for manifest in yaml.safe_load_all(path.read_text()):
        check_object(manifest)


def check_object(manifest: dict[str, Any]) -> None:
    """A Kubernetes object has its three fields; one of this project is valid.

    A manifest that begins with ``spec:`` is a part of a RagCache.
    """
    if set(manifest) == {"spec"}:
        manifest = {**minimal(), **manifest}
    expect({"apiVersion", "kind", "metadata"} <= set(manifest), f"no object: {manifest}")
    if str(manifest["apiVersion"]).startswith("ragcache.dev/"):
        parse(manifest)


def check_helm(words: Sequence[str]) -> None:
    """The chart exists and has the values that are set."""
    verb, *rest = words
    options = {"--namespace", "-n", "--set", "--version", "--timeout"}
    flags, plain = _flags(rest, options)
    expect(verb in {"install", "upgrade", "uninstall", "template"}, f"helm {verb} has no check")
    if verb == "uninstall":
        return
    chart = ROOT / plain[1]
    expect((chart / "Chart.yaml").is_file(), f"no chart {plain[1]}")
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for setting in flags.get("--set", ()):
        node: Any = values
        for part in setting.partition("=")[0].split("."):
            expect(isinstance(node, dict) and part in node, f"no value {setting}")
            node = node[part]


def _flags(words: Sequence[str], with_value: set[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Split arguments into options, with their values, and the rest."""
    flags: dict[str, list[str]] = {}
    plain: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, has_value, value = word.partition("=")
        if not word.startswith("-"):
            plain.append(word)
        elif name.startswith("--") and has_value:
            flags.setdefault(name, []).append(value)
        elif name in with_value:
            expect(left, f"{name} has no value")
            flags.setdefault(name, []).append(left.pop(0))
        else:
            flags.setdefault(name, [])
    return flags, plain


@functools.cache
def paths() -> dict[str, Any]:
    """The paths of the gateway's own OpenAPI document."""
    gateway = FastAPI()
    for routes in ROUTES:
        gateway.include_router(routes.router)
    found: dict[str, Any] = describe(gateway)["paths"]
    return found


def check_curl(words: Sequence[str]) -> None:
    """The gateway has the path and the method, and its model takes the body."""
    parser = argparse.ArgumentParser(prog="curl", exit_on_error=False)
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-F", "--form", action="append", default=[])
    parser.add_argument("-d", "--data", "--data-binary")
    parser.add_argument("-X", "--request")
    parser.add_argument("-o", "--output")
    for flag in (("-N",), ("-s",), ("-i",), ("-f", "--fail")):
        parser.add_argument(*flag, action="store_true")
    parser.add_argument("url")
    given = parser.parse_args(words)
    url = given.url if "://" in given.url else f"http://{given.url}"
    has_body = given.data is not None or given.form
    method = (given.request or ("post" if has_body else "get")).lower()
    if (path := unquote(urlsplit(url).path)) == "/openapi.json":
        return
    check_endpoint(method, path)
    if given.data is not None and not given.data.startswith("@"):
        expect(any("json" in header for header in given.header), "sends JSON without its type")
        check_body(path, json.loads(given.data))


def check_endpoint(method: str, path: str) -> None:
    """The gateway serves the method of the path."""
    for template, methods in paths().items():
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template))
        if re.fullmatch(pattern, path) and method in methods:
            return
    raise Wrong(f"the gateway has no {method.upper()} {path}")


def check_body(path: str, body: object) -> None:
    """The model of an endpoint takes a body."""
    expect(path in BODIES, f"no model for the body of {path}")
    BODIES[path].model_validate(body)


def check_docker(words: Sequence[str]) -> None:
    """The Dockerfile has the target."""
    flags, _ = _flags(words, {"--target", "--tag", "-t", "--build-arg"})
    stages = re.findall(r"^FROM .* AS (\S+)", (ROOT / "Dockerfile").read_text(), re.M | re.I)
    for target in flags.get("--target", ()):
        expect(target in stages, f"no target {target}")


def check_pip(words: Sequence[str]) -> None:
    """The project has the extra that is installed from its folder."""
    verb, *rest = words
    expect(verb == "install", f"pip {verb} has no check")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in rest:
        extra = re.fullmatch(r"\.\[(\w+)\]", word)
        expect(extra and extra[1] in extras, f"no extra {word}")


def check_source(words: Sequence[str]) -> None:
    """Only the environment that ``make setup`` makes is activated."""
    expect(list(words) == [".venv/bin/activate"], f"activates {words}")


def check_export(words: Sequence[str]) -> None:
    """Variables begin with the project's prefix; their commands are checked by themselves."""
    names = [word.partition("=")[0] for word in words]
    expect(all(name.startswith("RAGCACHE_") for name in names), f"exports {names}")


CHECKS: Final[dict[str, Callable[[Sequence[str]], None]]] = {
    "ragcache": check_ragcache,
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "kubectl": check_kubectl,
    "helm": check_helm,
    "curl": check_curl,
    "docker": check_docker,
    "pip": check_pip,
    "source": check_source,
    "export": check_export,
}
WITHOUT: Final = {
    "apt": "a program of Debian, which needs root",
    "ocrmypdf": "a program of Debian that readers install if they have scans",
    "ctr": "a command of containerd, which needs a node of a cluster",
    "base64": "a program of every system; its input is checked",
    "openssl": "a program of every system",
    "sed": "a program of every system",
}
"""Programs that no check covers, and why."""


def check(command: Command) -> None:
    """Check one command.

    Raises:
        Wrong: A reader could not run it.
    """
    program, *words = command.words
    if program in WITHOUT or program == SUBSTITUTED:
        return
    try:
        expect(program in CHECKS, f"no check for {program!r}; add one, or a reason to WITHOUT")
        CHECKS[program](words)
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{type(error).__name__}: {error}") from error
