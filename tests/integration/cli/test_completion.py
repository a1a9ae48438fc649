"""``ragcache completion``: the scripts, and what bash proposes with one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache_cli.main import app


def script(shell: str) -> str:
    result = CliRunner().invoke(app, ["completion", shell])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "complete -o default -F _ragcache_completion ragcache"),
        ("zsh", "#compdef ragcache"),
        ("fish", "complete"),
    ],
)
def test_every_shell_gets_its_script(shell: str, line: str) -> None:
    assert line in script(shell)


def test_another_shell_is_refused() -> None:
    result = CliRunner().invoke(app, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def bash(text: str) -> str:
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("words", "index", "proposed"),
    [
        ("ragcache co", 1, {"collection", "completion"}),
        ("ragcache collection ", 2, {"list", "get", "put", "patch", "delete"}),
        ("ragcache top --on", 2, {"--once"}),
    ],
)
def test_bash_proposes_commands_and_options(
    tmp_path: Path, words: str, index: int, proposed: set[str]
) -> None:
    file = tmp_path / "ragcache.bash"
    file.write_text(script("bash"))
    subprocess.run(["bash", "-n", str(file)], check=True)
    program = tmp_path / "ragcache"
    program.write_text(
        f"#!{sys.executable}\nfrom ragcache_cli.main import main\nmain()\n", encoding="utf-8"
    )
    program.chmod(0o755)
    found = bash(
        f'PATH={tmp_path}:$PATH; source {file}; COMP_WORDS=({words} ""); COMP_CWORD={index}; '
        f"{'' if words.endswith(' ') else 'unset COMP_WORDS[-1]; '}"
        '_ragcache_completion ragcache; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert set(found.split()) == proposed
