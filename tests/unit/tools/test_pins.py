"""Images install packages by their hashes, and releases are built on images with digests."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from tools.pins import BUILD, EXTRAS, FOLDER, ROOT, check, lines_of, problems_of, read_pins

DOCKERFILE = (ROOT / "Dockerfile").read_text()
DIGEST = "0" * 64
GOOD = f"numpy==2.3.5 --hash=sha256:{DIGEST}"


@pytest.mark.parametrize("name", [*EXTRAS, *BUILD])
def test_the_requirements_of_images_have_every_package_with_its_hash(name: str) -> None:
    assert check(name) == []
    assert "://" not in (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("numpy==2.3.5", "is not NAME==VERSION"),
        ("numpy>=2.3.5 --hash=sha256:" + DIGEST, "is not NAME==VERSION"),
        (f"numpy==2.3.5 --hash=md5:{DIGEST}", "is not NAME==VERSION"),
        (f"numpy==2.3.6 --hash=sha256:{DIGEST}", "numpy is 2.3.6, and constraints.txt has 2.3.5"),
        (f"wheel==1.0 --hash=sha256:{DIGEST}", "numpy is missing"),
    ],
)
def test_a_line_without_a_hash_or_of_another_version_is_named(line: str, problem: str) -> None:
    needed, pins = {"numpy"}, read_pins("# pins\nNumPy==2.3.5\n")
    assert problems_of([GOOD], needed, pins) == []
    assert any(problem in one for one in problems_of([line], needed, pins))


def test_a_package_without_a_hash_is_refused() -> None:
    def installed(name: str, **info: Any) -> dict[str, Any]:
        return {"metadata": {"name": name, "version": "1"}, "download_info": info}

    own = installed("ragcache", dir_info={})
    hashed = installed("A_b", archive_info={"hashes": {"sha256": DIGEST}})
    assert lines_of({"install": [own, hashed]}) == [f"a-b==1 --hash=sha256:{DIGEST}"]
    with pytest.raises(ValueError, match="c==1 has no SHA-256"):
        lines_of({"install": [installed("c", archive_info={})]})


def test_every_image_is_built_on_one_that_an_argument_names() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\S+)", DOCKERFILE, re.MULTILINE)
    stages = {name for _, name in bases}
    assert {base for base, _ in bases} - stages == {"${PYTHON_IMAGE}", "${VLLM_IMAGE}"}


@pytest.mark.parametrize("argument", ["PYTHON_IMAGE", "VLLM_IMAGE"])
@pytest.mark.parametrize(
    ("version", "digest", "is_built"),
    [
        ("dev", "", True),
        ("0.5.0.dev0", "", True),
        ("1.0.0", "", False),
        ("1.0.0", f"@sha256:{DIGEST}", True),
    ],
)
def test_a_release_is_built_only_on_an_image_with_a_digest(
    argument: str, version: str, digest: str, is_built: bool
) -> None:
    steps = re.findall(r"^RUN (case [^\n]*\n[^\n]*)$", DOCKERFILE, re.MULTILINE)
    [step] = [one for one in steps if f"${argument}" in one]
    env = {"VERSION": version, argument: f"dev/image:1{digest}"}
    done = subprocess.run(
        ["/bin/sh", "-c", step], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == is_built, done.stderr
    assert (argument in done.stderr) != is_built
