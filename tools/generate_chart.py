"""Generate the chart's values.yaml and its README's table from values.schema.json, which alone says
what a value is; with --check, fail if they are stale.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parent.parent / "charts" / "ragcache-operator"
SCHEMA = CHART / "values.schema.json"
VALUES = CHART / "values.yaml"
README = CHART / "README.md"
_WIDTH = 98
_BEGIN, _END = "<!-- values -->", "<!-- /values -->"

Schema = dict[str, Any]


def leaves(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every value that has a default, by its path."""
    for name, value in schema["properties"].items():
        where = f"{path}.{name}" if path else name
        if "default" in value:
            yield where, value
        else:
            yield from leaves(value, where) if "properties" in value else ()


def values_yaml(schema: Schema) -> str:
    """The defaults, each below what it means."""
    head = "# Written by tools/generate_chart.py from values.schema.json; change that instead."
    return "\n".join([head, *_sections(schema, "")]) + "\n"


def values_table(schema: Schema) -> str:
    """The values as a Markdown table."""
    rows = [
        f"| `{path}` | `{json.dumps(value['default'])}` | {_described(value)} |"
        for path, value in leaves(schema)
    ]
    return "\n".join(["| Value | Default | Meaning |", "|---|---|---|", *rows])


def readme(text: str, schema: Schema) -> str:
    """Return the README with a new table."""
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    return f"{before}{_BEGIN}\n{values_table(schema)}\n{_END}{after}"


def _sections(schema: Schema, indent: str) -> Iterator[str]:
    for name, value in schema["properties"].items():
        if "default" not in value and "properties" not in value:
            continue  # Helm's own, without a value of ours
        if not indent:
            yield ""
        yield from _comment(value["description"], indent)
        if "default" in value:
            shown = yaml.safe_dump(value["default"], default_flow_style=None, width=_WIDTH).strip()
            yield from _assignment(name, value["default"], shown.removesuffix("\n..."), indent)
        else:
            yield f"{indent}{name}:"
            yield from _sections(value, f"{indent}  ")


def _assignment(name: str, default: Any, shown: str, indent: str) -> Iterator[str]:
    if isinstance(default, dict) and default:
        yield f"{indent}{name}:"
        yield from (f"{indent}  {key}: {value}" for key, value in default.items())
    else:
        yield f"{indent}{name}: {json.dumps(default) if default == '' else shown}"


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - len(indent) - 2):
        yield f"{indent}# {line}"


def _described(value: Schema) -> str:
    text: str = value["description"]
    if "enum" in value:
        text += f" One of {', '.join(f'`{choice}`' for choice in value['enum'])}."
    return text.replace("|", "\\|")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    schema = json.loads(SCHEMA.read_text())
    fresh = {VALUES: values_yaml(schema), README: readme(README.read_text(), schema)}
    stale = [path for path, text in fresh.items() if not path.exists() or path.read_text() != text]
    if check and stale:
        names = ", ".join(path.name for path in stale)
        print(f"stale: {names}; run tools/generate_chart.py", file=sys.stderr)
        return 1
    for path in stale:
        path.write_text(fresh[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
