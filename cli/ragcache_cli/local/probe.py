"""Ask a part how it is, as a kubelet does."""

from __future__ import annotations

import httpx

from ragcache_cli.local.part import Check


class Prober:
    """Runs checks; one for many parts."""

    def __init__(self) -> None:
        # Neither proxies nor certificates: everything asked is on this machine.
        self._http = httpx.AsyncClient(trust_env=False, verify=False)

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def ask(self, check: Check) -> str | None:
        """None for a yes; else why not, in a few words. Answers within the check's timeout."""
        url = f"http://{check.address}{check.path}"
        try:
            reply = await self._http.get(url, timeout=check.timeout_s)
        except httpx.TimeoutException:
            return f"no answer within {check.timeout_s:g} s"
        except httpx.HTTPError:
            return "not listening"
        if reply.status_code >= 400:
            return _reason(reply)
        return None


def _reason(reply: httpx.Response) -> str:
    """Why a part said no: its progress, the message of our own error bodies, else what it wrote."""
    try:
        said = reply.json()
        reason = str(said["progress"] if "progress" in said else said["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {reply.status_code}: {reply.text}"
    return " ".join(reason.split())[:200]
