"""Parses YAML manifests to typed objects, and reports every problem with its path and a fix."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.collection import KIND as COLLECTION_KIND
from ragcache_operator.spec.collection import RagCollection
from ragcache_operator.spec.consistency import CONSISTENCY
from ragcache_operator.spec.ragcache import KIND, RagCache
from ragcache_operator.spec.validation import check_rules
from ragcache_operator.spec.values import API_VERSION

_Root = TypeVar("_Root", RagCache, RagCollection)

_MAX_FILE_BYTES = 1 << 20


class InvalidManifest(InvalidInput):
    """A manifest has problems. The fields of InvalidInput describe the first of them."""

    def __init__(self, problems: Sequence[InvalidInput]) -> None:
        super().__init__(problems[0].field, problems[0].problem, problems[0].fix)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def load_manifest(path: Path) -> RagCache:
    """Read the one RagCache in a YAML file.

    Raises:
        InvalidInput: The file cannot be read, or its manifest is invalid (InvalidManifest).
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(
            str(path), f"cannot be read: {error.strerror}", "name a manifest with -f"
        ) from error
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidInput(str(path), "is over 1 MiB", "name a manifest with -f")
    return parse_manifest(_only_ragcache(path, _documents(path, data)))


def parse_manifest(manifest: Mapping[str, Any]) -> RagCache:
    """Parse and check the manifest of a RagCache.

    A null means "not given", as it does to the API server. The status is ignored.

    Raises:
        InvalidManifest: The manifest is invalid. The error has every problem.
    """
    return _check_consistency(_validate(RagCache, manifest))


def parse_collection(manifest: Mapping[str, Any]) -> RagCollection:
    """Parse and check the manifest of a RagCollection, as ``parse_manifest`` does.

    Raises:
        InvalidManifest: The manifest is invalid. The error has every problem.
    """
    return _check_consistency(_validate(RagCollection, manifest))


def parse(manifest: Mapping[str, Any]) -> RagCache | RagCollection:
    """Parse and check a manifest of the kind that it names.

    Raises:
        InvalidManifest: The manifest is invalid. The error has every problem.
    """
    if manifest.get("kind") == COLLECTION_KIND:
        return parse_collection(manifest)
    return parse_manifest(manifest)


def parse_unchecked(manifest: Mapping[str, Any]) -> RagCache | RagCollection:
    """Parse a manifest of the kind that it names, without the rules between its fields.

    Raises:
        InvalidManifest: A field is invalid. The error has every problem.
    """
    if manifest.get("kind") == COLLECTION_KIND:
        return _validate(RagCollection, manifest)
    return _validate(RagCache, manifest)


def _validate(root: type[_Root], manifest: Mapping[str, Any]) -> _Root:
    try:
        given = {key: value for key, value in _without_nulls(manifest).items() if key != "status"}
        return root.model_validate(given)
    except RecursionError:
        problems = [
            InvalidInput(
                "manifest", "is nested too deeply", "write each field as in docs/reference"
            )
        ]
    except ValidationError as error:
        problems = [
            _problem(root, details)
            for details in error.errors(include_url=False)
            if not _is_consequence(details)
        ]
    raise InvalidManifest(problems)


def _check_consistency(value: _Root) -> _Root:
    problems = check_rules(CONSISTENCY, value)
    if problems:
        raise InvalidManifest(problems)
    return value


def _is_consequence(details: ErrorDetails) -> bool:
    """Whether an error follows from another: pydantic calls a list of one bad item too short."""
    return details["type"] == "too_short" and bool(details["input"])


def _documents(path: Path, data: bytes) -> list[Any]:
    try:
        documents = list(yaml.load_all(data, _Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise InvalidInput(
            where,
            f"is not valid YAML: {error.problem or error.context}",
            "check the indentation there",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise InvalidInput(
            str(path), f"is not valid YAML: {str(error).splitlines()[0]}", "save it as UTF-8 text"
        ) from error
    except RecursionError as error:
        raise InvalidInput(str(path), "is nested too deeply", "write a plain manifest") from error
    return [document for document in documents if document is not None]


def _only_ragcache(path: Path, documents: Sequence[Any]) -> Mapping[str, Any]:
    """Return the only RagCache of a file, and reject a file with other objects."""
    ours = [d for d in documents if isinstance(d, dict) and d.get("kind") == KIND]
    if not documents or (len(documents) > 1 and not ours):
        raise InvalidInput(str(path), f"contains no {KIND}", "see examples/quickstart.yaml")
    if len(ours) > 1:
        raise InvalidInput(
            str(path), f"contains {len(ours)} {KIND} objects", "put each into a separate file"
        )
    others = [d for d in documents if d not in ours]
    if ours and others:
        raise InvalidManifest(
            [
                InvalidInput(
                    str(path),
                    f"contains {_kind(other)} besides the {KIND}",
                    "move it to a separate file",
                )
                for other in others
            ]
        )
    if not isinstance(documents[0], dict):
        raise InvalidInput(str(path), "is not a mapping", "see examples/quickstart.yaml")
    return documents[0]


def _kind(document: Any) -> str:
    kind = document.get("kind") if isinstance(document, dict) else None
    return f"a {kind}" if isinstance(kind, str) else "a document without a kind"


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that also rejects duplicate keys and aliases.

    YAML would keep the last of two equal keys without a warning. A few lines of aliases can expand
    to more than memory holds, or refer to themselves.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                problem=f"the alias *{event.anchor} is not supported, write its value out",
                problem_mark=event.start_mark,
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {key_node.value!r} is given twice",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


# Problem and fix by pydantic's error type.
_PHRASES = {
    "literal_error": ("{shown} is not allowed", "use {expected}"),
    "greater_than_equal": ("{shown} is too small", "use at least {ge}"),
    "less_than_equal": ("{shown} is too large", "use at most {le}"),
    "string_too_long": ("is longer than {max_length} characters", "shorten it"),
    "string_too_short": ("is empty", "set a value, or leave the field out"),
    "too_long": ("has {actual_length} items", "use at most {max_length}"),
    "too_short": ("is empty", "add an item, or leave the field out"),
    "string_type": ("{shown} is not a string", "write a string"),
    "string_unicode": ("contains an incomplete character", "write it in UTF-8"),
    "int_type": ("{shown} is not an integer", "write an integer, without quotes"),
    "float_type": ("{shown} is not a number", "write a number, without quotes"),
    "finite_number": ("{shown} is not a number", "write a number, without quotes"),
    "bool_type": ("{shown} is neither true nor false", "write true or false, without quotes"),
    "model_type": ("{shown} is not a mapping", "write a mapping"),
    "dict_type": ("{shown} is not a mapping", "write a mapping"),
    "tuple_type": ("{shown} is not a list", "write a list"),
    "invalid_key": ("the key is not a string", "write it in quotes"),
}


def _problem(root: type[BaseModel], details: ErrorDetails) -> InvalidInput:
    loc, ctx = details["loc"], details.get("ctx", {})
    field = _path(loc)
    match details["type"]:
        case "refused":
            return InvalidInput(field, ctx["problem"], ctx["fix"])
        case "extra_forbidden":
            return InvalidInput(field, "unknown field", _suggestion(root, loc))
        case "missing":
            return InvalidInput(field, "is missing", _hints(root).get(field, "add it"))
    problem, fix = _PHRASES.get(details["type"], (details["msg"], "correct it"))
    words = {"shown": _shown(details["input"]), **ctx}
    return InvalidInput(field, problem.format_map(words), fix.format_map(words))


def _path(loc: Sequence[int | str]) -> str:
    """Format a pydantic location as in a manifest: ``spec.engines[0].name``."""
    path = ""
    # For an invalid key of a mapping, pydantic adds a last part "[key]".
    for part in loc[:-1] if loc and loc[-1] == "[key]" else loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "manifest"


def _suggestion(root: type[BaseModel], loc: Sequence[int | str]) -> str:
    known = _fields(root, loc[:-1])
    unknown = str(loc[-1])
    # A name that differs only in case and separators is the best match: max_length is maxLength.
    by_lower_case = {name.lower(): name for name in known}
    exact = by_lower_case.get(unknown.replace("_", "").replace("-", "").lower())
    close = [exact] if exact else difflib.get_close_matches(unknown, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"the fields here are {', '.join(known)}"


def _fields(root: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """Return the field names of the mapping at a location, as in a manifest."""
    model = root
    for part in loc:
        if isinstance(part, int):
            continue
        field = next(f for name, f in model.model_fields.items() if part in (name, f.alias))
        model = next(_models(field.annotation))
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation, such as one of a list that may be missing."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models(one)


def _hints(root: type[BaseModel]) -> dict[str, str]:
    """Return the fix for each required field, by its path."""
    kind = KIND if root is RagCache else COLLECTION_KIND
    return {
        "apiVersion": f"write apiVersion: {API_VERSION}",
        "kind": f"write kind: {kind}",
        "metadata": "write metadata: {name: my-name}",
        "metadata.name": "write name: my-name",
        "spec": "write spec: {cacheRef: {name: my-cache}, sources: [...]}",
        "spec.cacheRef": "write cacheRef: {name: my-cache}, the RagCache that stores the documents",
        "spec.sources": "write sources: [{configMap: {name: my-documents}}], or another source",
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
