"""Ask a part how it is, as a kubelet does."""

from __future__ import annotations

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ragcache_cli.part import Check


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
        if check.kind == "http":
            return await self._ask_http(check)
        return await _ask_grpc(check)

    async def _ask_http(self, check: Check) -> str | None:
        url = f"http://{check.address}{check.target}"
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
    """Why a part said no: the message of our own error bodies, else what it wrote."""
    try:
        reason = str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = f"status {reply.status_code}: {reply.text}"
    return " ".join(reason.split())[:200]


async def _ask_grpc(check: Check) -> str | None:
    request = health_pb2.HealthCheckRequest(service=check.target)
    options = [("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(str(check.address), options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = await stub.Check(request, timeout=check.timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer within {check.timeout_s:g} s"
            return "not listening"
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        return "not serving yet"
    return None
