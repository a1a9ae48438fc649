"""Probes a part over HTTP, as a kubelet does."""

from __future__ import annotations

import httpx

from ragcache_cli.local.part import Check


class Prober:
    """Runs the probes of all parts."""

    def __init__(self) -> None:
        # No proxies and no certificates: all parts are on this machine.
        self._http = httpx.AsyncClient(trust_env=False, verify=False)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, check: Check, api_key: str | None = None) -> str | None:
        """Run a probe within its timeout; return None on success, else the reason."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        url = f"http://{check.address}{check.path}"
        try:
            reply = await self._http.get(url, timeout=check.timeout_s, headers=headers)
        except httpx.TimeoutException:
            return f"no answer within {check.timeout_s:g} s"
        except httpx.HTTPError:
            return "not listening"
        if reply.status_code >= 400:
            return _reason(reply)
        return None


def _reason(reply: httpx.Response) -> str:
    """Return the reason in a failed probe's body: progress, an error message, or the text."""
    try:
        said = reply.json()
        reason = str(said["progress"] if "progress" in said else said["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {reply.status_code}: {reply.text}"
    return " ".join(reason.split())[:200]
