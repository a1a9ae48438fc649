"""The public keys of one issuer of tokens, which a gateway reads and keeps for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from ragcache_core.access.token_claims import TokenIssuer
from ragcache_core.errors import RagCacheError, Unavailable
from ragcache_gateway.auth.issuer_documents import IssuerDocuments
from ragcache_gateway.tasks import BackgroundTasks

log = logging.getLogger(__name__)

ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
"""Signatures that a gateway accepts. All of them have a public key, so none can be made with it."""

REFRESH_S: Final = 300.0
"""Age at which keys are read again. Until then, a key that the issuer has removed stays valid."""
KEEP_S: Final = 3600.0
"""Age at which keys are no longer used, if the issuer does not answer."""
RETRY_S: Final = 10.0
"""Least time between two reads, also where tokens name keys that are not known."""
MAX_ISSUER_KEYS: Final = 64
_MIN_RSA_BITS: Final = 2048


class IssuerKeys(BackgroundTasks):
    """The keys of one issuer. For one event loop.

    It reads them for the first token, again when they are old, and when a token names a key that
    it does not know. Requests that wait for a read share it.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        issuer: TokenIssuer,
        documents: IssuerDocuments,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.issuer = issuer
        self._documents = documents
        self._clock = clock
        self._keys: Mapping[tuple[str | None, str], PyJWK] = {}  # by id and algorithm
        self._read_s = float("-inf")
        self._tried_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self.is_failing = False

    async def find(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """Return the key of a token; None: the issuer has no such key.

        Raises:
            Unavailable: The keys are not known, and the issuer does not tell them now.
        """
        found = self._pick(key_id, algorithm)
        if self._age_s > KEEP_S or found is None:
            await self._refresh()
            found = self._pick(key_id, algorithm)
        elif self._age_s > REFRESH_S:
            self._begin_refresh()
        if self._age_s > KEEP_S or (found is None and self.is_failing):
            wait_s = max(1.0, self._tried_s + RETRY_S - self._clock())
            problem = f"the keys of {self.issuer.name!r} cannot be read"
            raise Unavailable("issuer", problem, wait_s)
        return found

    @property
    def _age_s(self) -> float:
        return self._clock() - self._read_s

    def _pick(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        if key_id is not None:
            return self._keys.get((key_id, algorithm))
        # A token without an id is clear only if there is one key.
        fitting = [one for (_, name), one in self._keys.items() if name == algorithm]
        return fitting[0] if len(fitting) == 1 else None

    def _begin_refresh(self) -> asyncio.Task[None] | None:
        """Begin to read the keys, or return the read that goes on. None: it is too soon."""
        if self._reading is not None and not self._reading.done():
            return self._reading
        if self._clock() - self._tried_s < RETRY_S:
            return None
        self._tried_s = self._clock()
        self._reading = self._spawn(self._read(), "issuer keys")
        return self._reading

    async def _refresh(self) -> None:
        if (reading := self._begin_refresh()) is not None:
            # A client that disconnects must not end the read of the others.
            await asyncio.shield(reading)

    async def _read(self) -> None:
        name = self.issuer.name
        try:
            keys = usable_keys(await self._documents.keys_of(self.issuer))
        except RagCacheError as error:
            if not self.is_failing:
                log.warning("issuer keys: not read issuer=%s error=%s", name, error)
            self.is_failing = True
            return
        except Exception:
            log.exception("issuer keys: not read issuer=%s", name)
            self.is_failing = True
            return
        if keys.keys() != self._keys.keys() or self.is_failing:
            log.info("issuer keys: read issuer=%s keys=%d", name, len(keys))
        self._keys, self._read_s, self.is_failing = keys, self._clock(), False


def usable_keys(given: Sequence[Any]) -> dict[tuple[str | None, str], PyJWK]:
    """Return the keys that may verify tokens, by id and algorithm. Others are left out.

    Left out are symmetric keys, keys for encryption, weak keys, and keys of other algorithms. A key
    has one algorithm, so that no token can choose how its key is used.

    Source: RFC 7517, section 4; RFC 8725, section 3.1.
    """
    found: dict[tuple[str | None, str], PyJWK] = {}
    for one in given[:MAX_ISSUER_KEYS]:
        if not isinstance(one, dict) or one.get("use", "sig") != "sig":
            continue
        key_id = one.get("kid")
        if key_id is not None and not isinstance(key_id, str):
            continue
        try:
            key = PyJWK(one)
        except (PyJWTError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue
        if _is_usable(key):
            found[key_id, key.algorithm_name] = key
    return found


def _is_usable(key: PyJWK) -> bool:
    match key.algorithm_name, key.key:
        case "RS256", RSAPublicKey() as public:
            return public.key_size >= _MIN_RSA_BITS
        case "ES256", EllipticCurvePublicKey() as public:
            return isinstance(public.curve, SECP256R1)
        case "EdDSA", Ed25519PublicKey():
            return True
        case _:
            return False
