"""JSON Web Tokens that callers send in place of an API key.

Source: RFC 7519 (JWT), RFC 8725 (best current practices), RFC 9068 (access tokens).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import jwt
from jwt import exceptions

from ragcache_core.access.token_claims import TokenIssuer
from ragcache_core.errors import RagCacheError
from ragcache_gateway.auth.issuer_keys import ALGORITHMS, IssuerKeys

MAX_TOKEN_CHARS: Final = 16_384
MAX_KEY_ID_CHARS: Final = 256
LEEWAY_S: Final = 30.0
"""By how much the clocks of an issuer and of a gateway may differ."""

_START: Final = "eyJ"
"""Of every token: ``{"`` in base64."""
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_REQUIRED: Final = ("exp", "iss", "aud")
_MALFORMED: Final = "is not well-formed"


class TokenRefused(RagCacheError):
    """A token is not valid. The error has nothing of the token.

    Args:
        problem: What is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"the token {problem}")
        self.problem = problem


class BearerTokens:
    """Verifies tokens of some issuers.

    Args:
        issuers: The keys of each issuer.
    """

    def __init__(self, issuers: Iterable[IssuerKeys]) -> None:
        self._by_url = {one.issuer.issuer: one for one in issuers}

    async def close(self) -> None:
        """End the reads of keys."""
        for one in self._by_url.values():
            await one.close()

    async def claims_of(self, text: str) -> tuple[TokenIssuer, dict[str, Any]] | None:
        """Return the issuer of a token and its verified claims.

        Returns:
            None: The text is no token, or the gateway has no issuers.

        Raises:
            TokenRefused: The token is not valid.
            Unavailable: The keys of its issuer are not known now.
        """
        if not self._by_url or not text.startswith(_START) or text.count(".") != 2:
            return None
        if len(text) > MAX_TOKEN_CHARS:
            raise TokenRefused(f"has over {MAX_TOKEN_CHARS} characters")
        algorithm, key_id, url = _unverified(text)
        issuer = self._by_url.get(url)
        if issuer is None:
            raise TokenRefused("is of no issuer of this gateway")
        key = await issuer.find(key_id, algorithm)
        if key is None:
            raise TokenRefused("is signed with no key of its issuer")
        return issuer.issuer, _verified(text, key, issuer.issuer)


def _unverified(text: str) -> tuple[str, str | None, str]:
    """Return the algorithm, the key's id and the issuer that a token claims.

    They only choose the key. Nothing else of the token counts before its signature is verified.

    Raises:
        TokenRefused: The token has none, or another algorithm.
    """
    try:
        header = jwt.get_unverified_header(text)
        claims = jwt.decode(text, options={"verify_signature": False})
    except (exceptions.PyJWTError, ValueError, TypeError, RecursionError) as error:
        raise TokenRefused(_MALFORMED) from error
    algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise TokenRefused(f"has another algorithm than {', '.join(ALGORITHMS)}")
    if "crit" in header or not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise TokenRefused("is of another type than JWT and at+jwt")
    if key_id is not None and (not isinstance(key_id, str) or len(key_id) > MAX_KEY_ID_CHARS):
        raise TokenRefused(_MALFORMED)
    url = claims.get("iss")
    if not isinstance(url, str):
        raise TokenRefused("has no claim 'iss'")
    return algorithm, key_id, url


def _verified(text: str, key: jwt.PyJWK, issuer: TokenIssuer) -> dict[str, Any]:
    """Return the claims of a token. Raises TokenRefused if it is not valid."""
    try:
        return jwt.decode(
            text,
            key,
            algorithms=ALGORITHMS,
            audience=issuer.audiences,
            issuer=issuer.issuer,
            leeway=LEEWAY_S,
            options={"require": list(_REQUIRED)},
        )
    except exceptions.ExpiredSignatureError as error:
        raise TokenRefused("has expired") from error
    except exceptions.ImmatureSignatureError as error:
        raise TokenRefused("is not valid yet") from error
    except (exceptions.InvalidAudienceError, exceptions.MissingRequiredClaimError) as error:
        raise TokenRefused("is not for this gateway, or has no 'exp'") from error
    except (exceptions.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise TokenRefused("is not valid") from error
