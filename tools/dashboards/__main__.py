"""Write the dashboards and rules, or check them.

::

    python -m tools.dashboards --write
    python -m tools.dashboards --check [--static]

The check runs every query of every panel and rule against a real Prometheus, which scrapes a
platform under load. The last line of its output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys

from tools.dashboards.check import check, static_problems, undocumented_names
from tools.dashboards.files import write


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files")
    parser.add_argument("--check", action="store_true", help="run every query")
    parser.add_argument("--static", action="store_true", help="check only the files")
    given = parser.parse_args()
    if given.write:
        write()
        return 0
    if given.static:
        problems = [*static_problems(), *(f"undocumented: {one}" for one in undocumented_names())]
        print("\n".join(problems), file=sys.stderr)
        return 1 if problems else 0
    if given.check:
        report = check()
        print(json.dumps(report.json()))
        return 0 if report.has_passed else 1
    parser.error("give --write or --check")


if __name__ == "__main__":
    sys.exit(main())
