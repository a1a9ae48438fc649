"""Users of a test cluster and the files that let them in."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ADMIN_GROUP = "system:masters"


@dataclass(frozen=True, slots=True)
class User:
    """Someone with a bearer token; what they may do is up to RBAC."""

    name: str
    groups: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)


def write_token_file(path: Path, users: Sequence[User]) -> Path:
    """Write the API server's --token-auth-file."""
    lines = [f'{user.token},{user.name},{user.name},"{",".join(user.groups)}"' for user in users]
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_kubeconfig(path: Path, url: str, authority: Path, user: User) -> Path:
    """Write a kubeconfig that stands alone: the authority's certificate is inside."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "test",
                "cluster": {
                    "server": url,
                    "certificate-authority-data": base64.b64encode(authority.read_bytes()).decode(),
                },
            }
        ],
        "users": [{"name": user.name, "user": {"token": user.token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user.name}}],
        "current-context": "test",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(content))
    return path
