"""Issuers of tokens, as ``spec.gateway.oidc`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ragcache_core.access.caller import Scope
from ragcache_core.access.token_claims import TokenIssuer
from ragcache_operator.spec.values import (
    IssuerUrl,
    ManifestModel,
    ObjectName,
    ServerList,
    ServerSchema,
    StringPattern,
)

_ClaimValue = Annotated[str, Field(min_length=1, max_length=255)]
_ClaimValues = Annotated[tuple[_ClaimValue, ...], ServerList(64)]
_Claim = Annotated[
    str,
    Field(max_length=255),
    StringPattern(r"\S+", "claim", "write its name, or a path like realm_access.roles"),
]
_Tenant = Annotated[
    str,
    Field(max_length=64),
    StringPattern(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        "tenant",
        "use up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
    ),
]


class OidcScopesSpec(ManifestModel):
    """OidcScopesSpec sets which values of the claim give which scopes."""

    ask: _ClaimValues = ()
    """Values that allow questions, searches and models."""
    write: _ClaimValues = ()
    """Values that allow to write documents and collections."""
    view: _ClaimValues = ()
    """Values that allow to see the state of the platform."""
    admin: _ClaimValues = ()
    """Values that allow everything."""


class OidcIssuerSpec(ManifestModel):
    """OidcIssuerSpec sets an issuer of OpenID Connect whose tokens the gateway accepts."""

    name: ObjectName
    """Short name, like keycloak. Callers are called NAME:USER in logs, quotas and the audit log."""
    issuer: IssuerUrl
    """URL of the issuer, exactly as its tokens have it in iss. The gateway reads
    /.well-known/openid-configuration below it. Its certificate is of a public authority or of
    spec.trustedCA. An address that is not public needs issuers.allowedNetworks of the operator's
    chart."""
    audiences: Annotated[tuple[_ClaimValue, ...], ServerList(8, min_items=1)]
    """A token needs one of these audiences in aud, like the id of the client. A token for another
    program is not accepted."""
    jwks_url: IssuerUrl | None = None
    """URL of the issuer's public keys. If unset, the discovery document names it."""
    name_claim: _Claim = "sub"
    """Claim with the name of the user. It must be unique and must not change, or users get the
    KV of others."""
    scopes_claim: _Claim = "roles"
    """Claim with roles or groups, like groups, scope or realm_access.roles: a list, or words with
    spaces between."""
    scopes: OidcScopesSpec = OidcScopesSpec()
    """Values of scopesClaim that give scopes. A token may have several."""
    default_scopes: Annotated[tuple[Literal["ask", "view"], ...], ServerList(2)] = ()
    """Scopes of every token of this issuer and audience."""
    tenant_claim: _Claim | None = None
    """Claim with the tenant of the user: one text, or a list with one that names a tenant. If
    unset, its users have no tenant, and share KV as keys without a tenant do."""
    tenants: Annotated[
        Mapping[_ClaimValue, _Tenant],
        Field(max_length=256),
        ServerSchema({"x-kubernetes-map-type": "atomic"}),
    ] = Field(default_factory=dict)
    """Tenants by the value of tenantClaim, like {"/teams/red": red}. If unset, the value is the
    name of a tenant that the key file lists under [[tenants]]. A token of another tenant is
    refused."""
    collections_claim: _Claim | None = None
    """Claim with patterns of the collections that the user may name, like ["team-*"]. If set, each
    token without the scope admin needs it."""
    filter_claim: _Claim | None = None
    """Claim with the filter of the user's searches, a JSON object as in a search. If set, each
    token without the scopes write and admin needs it."""

    @property
    def rules(self) -> TokenIssuer:
        """The issuer as a gateway has it."""
        return TokenIssuer(
            name=self.name,
            issuer=self.issuer,
            audiences=self.audiences,
            scopes={
                Scope.ASK: self.scopes.ask,
                Scope.WRITE: self.scopes.write,
                Scope.VIEW: self.scopes.view,
                Scope.ADMIN: self.scopes.admin,
            },
            default_scopes=tuple(map(Scope, self.default_scopes)),
            scopes_claim=self.scopes_claim,
            name_claim=self.name_claim,
            tenant_claim=self.tenant_claim,
            tenants=dict(self.tenants),
            collections_claim=self.collections_claim,
            filter_claim=self.filter_claim,
            jwks_url=self.jwks_url,
        )
