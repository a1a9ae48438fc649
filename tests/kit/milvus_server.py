"""A private milvus-lite server on a port, which a test stops and starts again."""

from __future__ import annotations

from pathlib import Path

from milvus_lite.adapter.grpc.server import start_server_in_thread

_GRACE_S = 1


class MilvusServer:
    """A server of one test, with its data in a folder. It keeps its port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server, self._database, self._port = start_server_in_thread(
            str(self._folder), port=self._port
        )

    def stop(self) -> None:
        """End its connections and release its folder."""
        self._server.stop(_GRACE_S).wait()
        self._database.close()
