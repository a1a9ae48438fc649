"""Which files of audit logs a volume keeps of gateways that have stopped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_core.access.audit_files import STOPPED_S, AuditFile, files_to_delete

NOW_S = 1e9
GATEWAYS = ("docs-gateway-7c9-a", "docs-gateway-7c9-b", "docs-gateway-7c9-c")
FULL = "-01700000000000000000"

files = st.lists(
    st.builds(
        AuditFile,
        st.sampled_from(
            [f"{gateway}{end}" for gateway in GATEWAYS for end in ("", FULL, f"{FULL[:-1]}1")]
        ),
        st.integers(0, 100),
        st.floats(NOW_S - 3 * STOPPED_S, NOW_S),
    ),
    max_size=9,
    unique_by=lambda one: one.stem,
)


def test_the_name_of_a_file_tells_its_gateway() -> None:
    names = [AuditFile(f"{GATEWAYS[0]}{end}", 1, 0).gateway for end in ("", FULL)]
    assert names == [GATEWAYS[0]] * 2


@given(files, st.integers(0, 300))
def test_the_oldest_files_of_stopped_gateways_are_deleted_above_the_bound(
    found: list[AuditFile], max_bytes: int
) -> None:
    own = GATEWAYS[0]
    deleted = files_to_delete(found, own, NOW_S, max_bytes)
    writing = {own} | {one.gateway for one in found if one.changed_s > NOW_S - STOPPED_S}
    assert not writing & {one.gateway for one in deleted}
    stopped = [one for one in found if one.gateway not in writing]
    kept = [one for one in stopped if one not in deleted]
    assert sum(one.num_bytes for one in kept) <= max_bytes
    if deleted:
        last = max(deleted, key=lambda one: one.changed_s)
        assert all(one.changed_s >= last.changed_s for one in kept)
        assert sum(one.num_bytes for one in (*kept, last)) > max_bytes, "none too many"
