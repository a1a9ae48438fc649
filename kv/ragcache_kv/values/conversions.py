"""Converts core values to protobuf messages of the cache store and back, for both ends.

The functions ``from_*`` validate messages. They raise InvalidInput with the fix and the path of the
field, which begins with the argument ``field``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ragcache_core.errors import InvalidInput, TooLarge
from ragcache_core.identity.keys import KEY_BYTES, ChunkKey, VariantKey
from ragcache_core.identity.variant import (
    Codec,
    Influence,
    Miss,
    Origin,
    Precision,
    Provenance,
    Tier,
    ValueHeader,
    ValuePart,
    ValueShape,
    ValueTags,
    VariantInfo,
)
from ragcache_core.store_api import (
    ID_BYTES,
    MAX_KEYS,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_PREFIX_CHUNKS,
    MAX_TOKENS,
    REUSE,
    Ack,
    AsOf,
    ChunkVariants,
    Deletion,
    DeletionBatch,
    LookupAnswer,
    LookupKey,
    NewVariant,
    PutCompletion,
    PutOutcome,
    ReportedUses,
    StoredVariant,
    VariantUse,
)
from ragcache_kv.codecs import encoded_part_bytes
from ragcache_wire.v1 import cachestore_pb2 as pb

DTYPES: Final = ("bfloat16", "float16", "float32")

_ACKS: Final = {ack: pb.Ack.Value(ack.name) for ack in Ack}
_ACKS_BACK: Final = {number: ack for ack, number in _ACKS.items()}
_OUTCOMES: Final = {outcome: pb.PutReply.Outcome.Value(outcome.name) for outcome in PutOutcome}
_OUTCOMES_BACK: Final = {number: outcome for outcome, number in _OUTCOMES.items()}
_MISSES_BACK: Final = {
    number: Miss[name.removeprefix("MISS_")] for name, number in pb.Miss.items() if number
}
_MISSES: Final = {miss: number for number, miss in _MISSES_BACK.items()}
_PRECISIONS: Final = {"": Precision(), str(Precision()): Precision()}


def to_key(key: VariantKey) -> pb.VariantKey:
    """Convert a variant key."""
    return pb.VariantKey(chunk=key.chunk, prefix=key.prefix)


def from_key(field: str, message: pb.VariantKey) -> VariantKey:
    """Read a variant key. Raises InvalidInput."""
    chunk, prefix = message.chunk, message.prefix
    if len(chunk) != KEY_BYTES or len(prefix) != KEY_BYTES:
        from_chunk(f"{field}.chunk", chunk)
        from_chunk(f"{field}.prefix", prefix)
    return VariantKey(chunk, prefix)


def from_keys(field: str, messages: Sequence[pb.VariantKey]) -> list[VariantKey]:
    """Read at most MAX_KEYS variant keys. Raises InvalidInput, TooLarge."""
    check_count(field, len(messages))
    try:
        return [VariantKey(message.chunk, message.prefix) for message in messages]
    except ValueError:  # find the invalid one
        return [from_key(f"{field}[{i}]", message) for i, message in enumerate(messages)]


def from_chunk(field: str, key: bytes) -> ChunkKey:
    """Read the key of a chunk or a prefix. Raises InvalidInput."""
    if len(key) != KEY_BYTES:
        raise InvalidInput(field, f"has {len(key)} bytes", f"send {KEY_BYTES}")
    return key


def from_chunks(field: str, keys: Sequence[bytes], most: int = MAX_KEYS) -> tuple[ChunkKey, ...]:
    """Read at most ``most`` chunk keys. Raises InvalidInput, TooLarge."""
    check_count(field, len(keys), most)
    return tuple(from_chunk(f"{field}[{i}]", key) for i, key in enumerate(keys))


def check_count(field: str, number: int, most: int = MAX_KEYS) -> None:
    """Raise TooLarge for more than ``most`` entries."""
    if number > most:
        raise TooLarge(field, f"has {number} entries", f"send at most {most}")


def from_name(field: str, name: str) -> str:
    """Read the name of a domain or a document; "" for none. Raises TooLarge."""
    if len(name) > MAX_NAME_CHARS:
        raise TooLarge(field, f"has {len(name)} characters", f"send at most {MAX_NAME_CHARS}")
    return name


def to_info(info: VariantInfo, value_format: int) -> pb.VariantInfo:
    """Convert the description of a variant."""
    precision = info.precision
    return pb.VariantInfo(
        num_tokens=info.num_tokens,
        num_bytes=info.num_bytes,
        base_position=info.base_position,
        exact=info.provenance.exact,
        precision="" if precision == _PRECISIONS[""] else str(precision),
        format=value_format,
    )


def from_info(field: str, message: pb.VariantInfo, max_value_bytes: int) -> VariantInfo:
    """Read the description of a variant, but not its format. Raises InvalidInput, TooLarge."""
    num_tokens, num_bytes = message.num_tokens, message.num_bytes
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise InvalidInput(f"{field}.num_tokens", f"is {num_tokens}", f"send 1 to {MAX_TOKENS}")
    if num_bytes == 0:
        raise InvalidInput(f"{field}.num_bytes", "is 0", "send the size of the value")
    if num_bytes > max_value_bytes:
        raise TooLarge(
            f"{field}.num_bytes",
            f"is {num_bytes}",
            f"send values of at most {max_value_bytes} bytes",
        )
    if message.base_position > MAX_TOKENS:
        raise InvalidInput(
            f"{field}.base_position", f"is {message.base_position}", f"send 0 to {MAX_TOKENS}"
        )
    return VariantInfo(
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        base_position=message.base_position,
        provenance=Provenance(exact=message.exact),
        precision=_PRECISIONS.get(message.precision)
        or from_precision(f"{field}.precision", message.precision),
    )


def from_precision(field: str, text: str) -> Precision:
    """Read the precision of a value; "" for native. Raises InvalidInput."""
    try:
        return Precision.parse(text or str(Precision()))
    except ValueError as error:
        raise InvalidInput(field, f"is {text!r}", 'send "key/value" of known codecs') from error


def to_parts(parts: Iterable[ValuePart]) -> list[pb.ValuePart]:
    """Convert the parts of a value."""
    return [pb.ValuePart(num_bytes=part.num_bytes, checksum=part.checksum) for part in parts]


def from_parts(
    field: str, messages: Sequence[pb.ValuePart], num_bytes: int
) -> tuple[ValuePart, ...]:
    """Read the parts of a value of num_bytes. Raises InvalidInput, TooLarge."""
    _check_sum(field, [message.num_bytes for message in messages], num_bytes)
    return tuple([ValuePart(message.num_bytes, message.checksum) for message in messages])


def _check_sum(field: str, sizes: Sequence[int], num_bytes: int) -> None:
    """Check that the sizes of parts add up to num_bytes. Raises InvalidInput, TooLarge."""
    if not sizes:
        raise InvalidInput(field, "is missing", "send the size of each part")
    check_count(field, len(sizes), MAX_PARTS)
    total = sum(sizes)
    if total != num_bytes:
        raise InvalidInput(
            field, f"has {total} bytes in all, not {num_bytes}", "send parts that add up"
        )


def to_shape(shape: ValueShape | None) -> pb.ValueShape | None:
    """Convert the shape of a value; None for opaque bytes."""
    if shape is None:
        return None
    return pb.ValueShape(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
    )


def from_shape(field: str, message: pb.ValueShape) -> ValueShape:
    """Read the shape of a value. Raises InvalidInput."""
    sizes = (message.num_layers, message.num_kv_heads, message.head_dim)
    for name, size in zip(("num_layers", "num_kv_heads", "head_dim"), sizes, strict=True):
        if not 1 <= size <= MAX_TOKENS:
            raise InvalidInput(f"{field}.{name}", f"is {size}", f"send 1 to {MAX_TOKENS}")
    if message.dtype not in DTYPES:
        raise InvalidInput(f"{field}.dtype", f"is {message.dtype!r}", f"send one of {DTYPES}")
    return ValueShape(*sizes, message.dtype)


def to_origin(origin: Origin) -> pb.Origin:
    """Convert the origin of a variant, without its cost, which is in the completion."""
    return pb.Origin(
        prefix_chunks=origin.prefix_chunks,
        parent=None if origin.parent is None else to_key(origin.parent),
        domain=origin.domain,
        document=origin.document,
        token_s=origin.token_s,
        influence=to_influence(origin.influence),
    )


def to_influence(influence: Influence) -> pb.Influence:
    """Convert what a variant depends on."""
    return pb.Influence(
        rights=influence.rights, writer=influence.writer, num_head=influence.num_head
    )


def from_influence(field: str, message: pb.Influence) -> Influence:
    """Read what a variant depends on. Raises InvalidInput."""
    for name, digest in (("rights", message.rights), ("writer", message.writer)):
        if len(digest) not in (0, KEY_BYTES):
            problem = f"has {len(digest)} bytes"
            raise InvalidInput(f"{field}.{name}", problem, f"send {KEY_BYTES} bytes or none")
    if message.num_head > MAX_PREFIX_CHUNKS:
        raise InvalidInput(
            f"{field}.num_head", f"is {message.num_head}", f"send at most {MAX_PREFIX_CHUNKS}"
        )
    return Influence(message.rights, message.writer, message.num_head)


def from_origin(field: str, message: pb.Origin) -> Origin:
    """Read the origin of a variant. Raises InvalidInput, TooLarge."""
    if not message.domain:
        raise InvalidInput(f"{field}.domain", "is missing", 'send the access domain ("public")')
    if not 0 <= message.token_s < math.inf:
        raise InvalidInput(f"{field}.token_s", f"is {message.token_s}", "send seconds, or 0")
    return Origin(
        prefix_chunks=from_chunks(
            f"{field}.prefix_chunks", message.prefix_chunks, MAX_PREFIX_CHUNKS
        ),
        parent=from_key(f"{field}.parent", message.parent) if message.HasField("parent") else None,
        domain=from_name(f"{field}.domain", message.domain),
        document=from_name(f"{field}.document", message.document),
        token_s=message.token_s,
        influence=from_influence(f"{field}.influence", message.influence),
    )


def to_as_of(as_of: AsOf) -> pb.AsOf:
    """Convert the deletes that a put may have missed."""
    return pb.AsOf(store=as_of.store, sequence=as_of.sequence, planned_at_ms=as_of.planned_at_ms)


def from_as_of(field: str, message: pb.AsOf) -> AsOf:
    """Read the deletes that a put may have missed. Raises InvalidInput."""
    return AsOf(_from_id(f"{field}.store", message.store), message.sequence, message.planned_at_ms)


def _from_id(field: str, raw: bytes) -> bytes:
    if raw and len(raw) != ID_BYTES:
        raise InvalidInput(field, f"has {len(raw)} bytes", f"send {ID_BYTES}, or none")
    return raw


def to_put_header(variant: NewVariant, ack: Ack, traceparent: str = "") -> pb.PutHeader:
    """Convert the header of a put: variant, acknowledgement and calling span."""
    return pb.PutHeader(
        key=to_key(variant.key),
        info=to_info(variant.info, variant.value_format),
        origin=to_origin(variant.origin),
        shape=to_shape(variant.shape),
        part_bytes=variant.part_bytes,
        ack=_ACKS[ack],
        as_of=to_as_of(variant.as_of),
        traceparent=traceparent,
    )


def from_put_header(
    field: str, message: pb.PutHeader, max_value_bytes: int
) -> tuple[NewVariant, Ack]:
    """Read the header of a put. Raises InvalidInput, TooLarge."""
    info = from_info(f"{field}.info", message.info, max_value_bytes)
    sizes = tuple(message.part_bytes)
    _check_sum(f"{field}.part_bytes", sizes, info.num_bytes)
    shape = None
    if message.HasField("shape"):
        shape = from_shape(f"{field}.shape", message.shape)
        if shape.num_layers != len(sizes):
            raise InvalidInput(
                f"{field}.part_bytes", f"has {len(sizes)} entries", "send one for each layer"
            )
        _check_sizes(f"{field}.part_bytes", sizes, shape, info)
    ack = _ACKS_BACK.get(message.ack)
    if ack is None:
        raise InvalidInput(f"{field}.ack", f"is {message.ack}", "send ACCEPTED or DURABLE")
    variant = NewVariant(
        key=from_key(f"{field}.key", message.key),
        info=info,
        origin=from_origin(f"{field}.origin", message.origin),
        shape=shape,
        part_bytes=sizes,
        value_format=message.info.format,
        as_of=from_as_of(f"{field}.as_of", message.as_of),
    )
    return variant, ack


def to_completion(completion: PutCompletion) -> pb.PutCompletion:
    """Convert the completion of a put."""
    return pb.PutCompletion(
        checksums=completion.checksums, cost_s=completion.cost_s, tag=completion.tag
    )


def from_completion(field: str, message: pb.PutCompletion, num_parts: int) -> PutCompletion:
    """Read the completion of a put of num_parts parts. Raises InvalidInput."""
    if len(message.checksums) != num_parts:
        raise InvalidInput(
            f"{field}.checksums",
            f"has {len(message.checksums)} entries",
            f"send one for each of the {num_parts} parts",
        )
    if not 0 <= message.cost_s < math.inf:
        raise InvalidInput(f"{field}.cost_s", f"is {message.cost_s}", "send seconds, or 0")
    try:
        ValueTags.from_bytes(message.tag)
    except ValueError as error:
        raise InvalidInput(f"{field}.tag", f"is wrong: {error}", "send tags, or none") from error
    return PutCompletion(tuple(message.checksums), message.cost_s, message.tag)


def _check_sizes(field: str, sizes: Sequence[int], shape: ValueShape, info: VariantInfo) -> None:
    """Check that the parts can be layers of shape in info's precision. Raises InvalidInput."""
    if Codec.PACKED in {info.precision.key, info.precision.value}:
        return  # its size depends on the numbers
    num_bytes = encoded_part_bytes(shape, info.num_tokens, info.precision)
    for i, size in enumerate(sizes):
        if size != num_bytes:
            raise InvalidInput(
                f"{field}[{i}]",
                f"is {size}",
                f"send the {num_bytes} bytes that {info.num_tokens} tokens of the shape take "
                f"as {info.precision}, or no shape for opaque bytes",
            )


def to_outcome(outcome: PutOutcome) -> pb.PutReply.Outcome.ValueType:
    """Convert the outcome of a put."""
    return _OUTCOMES[outcome]


def from_outcome(number: pb.PutReply.Outcome.ValueType) -> PutOutcome:
    """Read the outcome of a put. An unknown one counts as not stored."""
    return _OUTCOMES_BACK.get(number, PutOutcome.DELETED)


def to_miss(miss: Miss) -> pb.Miss.ValueType:
    """Convert the reason of a miss."""
    return _MISSES.get(miss, pb.MISS_NEVER_STORED)


def from_miss(number: pb.Miss.ValueType) -> Miss | None:
    """Read the reason of a miss; None for a hit."""
    if number == pb.MISS_UNSPECIFIED:
        return None
    return _MISSES_BACK.get(number, Miss.NEVER_STORED)


def to_reads(reads: Iterable[tuple[VariantKey, float, float]]) -> pb.ReadReport:
    """Convert reads without a request, with the CFO of each and the seconds that it took."""
    alike: dict[tuple[VariantKey, float], tuple[int, float]] = {}
    for key, fix_overhead, seconds in reads:
        times, before = alike.get((key, fix_overhead), (0, 0.0))
        alike[key, fix_overhead] = times + 1, before + seconds
    return pb.ReadReport(
        reads=[
            pb.ReadReport.Read(
                key=to_key(key), times=times, seconds=seconds, fix_overhead=fix_overhead
            )
            for (key, fix_overhead), (times, seconds) in alike.items()
        ]
    )


def to_get_request(
    keys: Iterable[VariantKey],
    exact: bool,
    domain: str,
    traceparent: str = "",
    fix_overheads: Mapping[VariantKey, float] | None = None,
) -> pb.GetRequest:
    """Convert the arguments of a get. fix_overheads: the CFO of each use; 0 where it has no key."""
    keys = list(keys)
    return pb.GetRequest(
        keys=[pb.VariantKey(chunk=key.chunk, prefix=key.prefix) for key in keys],
        exact=exact,
        domain=domain,
        traceparent=traceparent,
        fix_overheads=[fix_overheads.get(key, 0.0) for key in keys] if fix_overheads else (),
    )


def from_get_request(
    message: pb.GetRequest,
) -> tuple[list[VariantKey], bool, str, list[VariantUse]]:
    """Read keys, exact, domain and the use of each key. Raises InvalidInput, TooLarge."""
    keys = from_keys("keys", message.keys)
    uses = [REUSE] * len(keys)
    if message.fix_overheads:
        if len(message.fix_overheads) != len(keys):
            raise InvalidInput(
                "fix_overheads",
                f"has {len(message.fix_overheads)} entries",
                f"send one for each of the {len(keys)} keys, or none",
            )
        uses = [from_use(f"fix_overheads[{i}]", fix) for i, fix in enumerate(message.fix_overheads)]
    return keys, message.exact, from_name("domain", message.domain), uses


def from_use(field: str, fix_overhead: float, token_s: float = 0.0) -> VariantUse:
    """Read how a request used a variant. Raises InvalidInput."""
    try:
        return VariantUse(fix_overhead, token_s)
    except ValueError as error:
        raise InvalidInput(
            field, str(error), "send a CFO in [0, 1], and seconds that are finite and not negative"
        ) from error


def to_use_report(reports: Iterable[ReportedUses]) -> pb.UseReport:
    """Convert uses that needed no read."""
    return pb.UseReport(
        uses=[
            pb.UseReport.Use(
                key=to_key(one.key),
                times=one.times,
                fix_overhead=one.use.fix_overhead,
                token_s=one.use.token_s,
            )
            for one in reports
        ]
    )


def from_use_report(message: pb.UseReport) -> list[ReportedUses]:
    """Read uses that needed no read. Raises InvalidInput, TooLarge."""
    keys = from_keys("uses", [one.key for one in message.uses])
    return [
        ReportedUses(key, from_use(f"uses[{i}]", one.fix_overhead, one.token_s), one.times)
        for i, (key, one) in enumerate(zip(keys, message.uses, strict=True))
    ]


def to_miss_header(index: int, miss: Miss) -> pb.GetHeader:
    """Convert a miss of the key at index of the request."""
    return pb.GetHeader(index=index, miss=to_miss(miss))


def to_value_header(index: int, header: ValueHeader) -> pb.GetHeader:
    """Convert the header of a value, for the key at index of the request."""
    return pb.GetHeader(
        index=index,
        info=to_info(header.info, header.value_format),
        parts=to_parts(header.parts),
        shape=to_shape(header.shape),
        tier=header.tier,
        tag=header.tag,
    )


def from_value_header(field: str, message: pb.GetHeader) -> ValueHeader:
    """Read the header of a value. Raises InvalidInput."""
    info = from_info(f"{field}.info", message.info, message.info.num_bytes)
    return ValueHeader(
        info,
        from_parts(f"{field}.parts", message.parts, info.num_bytes),
        from_shape(f"{field}.shape", message.shape) if message.HasField("shape") else None,
        message.info.format,
        from_tier(f"{field}.tier", message.tier),
        message.tag,
    )


def to_lookup_key(key: LookupKey) -> pb.LookupKey:
    """Convert the key of a lookup."""
    return pb.LookupKey(chunk=key.chunk, prefix=key.prefix or b"", others=key.others)


def from_lookup_key(field: str, message: pb.LookupKey) -> LookupKey:
    """Read the key of a lookup. Raises InvalidInput."""
    chunk = from_chunk(f"{field}.chunk", message.chunk)
    prefix = from_chunk(f"{field}.prefix", message.prefix) if message.prefix else None
    return LookupKey(chunk, prefix, message.others)


def to_lookup_request(
    keys: Iterable[LookupKey], exact: bool, domain: str, *, lossy: bool = False
) -> pb.LookupRequest:
    """Convert the arguments of a lookup."""
    return pb.LookupRequest(keys=map(to_lookup_key, keys), exact=exact, domain=domain, lossy=lossy)


def from_lookup_request(message: pb.LookupRequest) -> tuple[list[LookupKey], bool, str]:
    """Read keys, exact and domain. Raises InvalidInput, TooLarge."""
    check_count("keys", len(message.keys))
    keys = [from_lookup_key(f"keys[{i}]", key) for i, key in enumerate(message.keys)]
    return keys, message.exact, from_name("domain", message.domain)


def to_stored_variant(stored: StoredVariant, value_format: int) -> pb.StoredVariant:
    """Convert what a lookup found of one variant."""
    return pb.StoredVariant(
        key=to_key(stored.key),
        info=to_info(stored.info, value_format),
        tier=stored.tier,
        load_s=stored.load_s,
        prefix_chunks=stored.prefix_chunks,
        copies=stored.copies,
        wants_higher_precision=stored.wants_higher_precision,
        influence=to_influence(stored.influence),
    )


def from_stored_variant(field: str, message: pb.StoredVariant) -> StoredVariant:
    """Read what a lookup found of one variant. Raises InvalidInput."""
    return StoredVariant(
        key=from_key(f"{field}.key", message.key),
        info=from_info(f"{field}.info", message.info, message.info.num_bytes),
        tier=from_tier(f"{field}.tier", message.tier),
        load_s=message.load_s,
        prefix_chunks=tuple(message.prefix_chunks),
        copies=tuple(message.copies),
        wants_higher_precision=message.wants_higher_precision,
        influence=from_influence(f"{field}.influence", message.influence),
    )


def from_tier(field: str, text: str) -> Tier:
    """Read a tier. Raises InvalidInput."""
    try:
        return Tier(text)
    except ValueError as error:
        raise InvalidInput(field, f"is {text!r}", f"send one of {[*Tier]}") from error


def to_variants(variants: ChunkVariants, value_format: int) -> pb.ChunkVariants:
    """Convert the answer to one key of a lookup."""
    return pb.ChunkVariants(
        stored=[to_stored_variant(one, value_format) for one in variants.stored],
        miss=pb.MISS_UNSPECIFIED if variants.miss is None else to_miss(variants.miss),
    )


def from_variants(field: str, message: pb.ChunkVariants) -> ChunkVariants:
    """Read the answer to one key of a lookup. Raises InvalidInput."""
    stored = tuple(
        [from_stored_variant(f"{field}.stored[{i}]", one) for i, one in enumerate(message.stored)]
    )
    return ChunkVariants(stored, from_miss(message.miss))


def to_lookup_reply(answer: LookupAnswer, value_format: int) -> pb.LookupReply:
    """Convert the answer of a lookup. Hello has the store's id."""
    return pb.LookupReply(
        variants=[to_variants(variants, value_format) for variants in answer.variants],
        delete_sequence=answer.as_of.sequence,
    )


def from_lookup_reply(message: pb.LookupReply, store: bytes) -> LookupAnswer:
    """Read the answer of a lookup. Raises InvalidInput.

    Args:
        message: The reply.
        store: The store's id, from Hello.
    """
    variants = [from_variants(f"variants[{i}]", one) for i, one in enumerate(message.variants)]
    return LookupAnswer(tuple(variants), AsOf(store, message.delete_sequence))


def to_deletion(deletion: Deletion) -> pb.Deletion:
    """Convert a deletion."""
    return pb.Deletion(
        id=deletion.id,
        chunks=deletion.chunks,
        variants=map(to_key, deletion.variants),
        documents=deletion.documents,
        domain=deletion.domain,
        made_at_ms=deletion.made_at_ms,
    )


def from_deletion(field: str, message: pb.Deletion) -> Deletion:
    """Read a deletion, whose id may be empty. Raises InvalidInput, TooLarge.

    A domain without documents means all of the domain, so it must not come with chunks or variants.
    """
    check_count(f"{field}.documents", len(message.documents))
    documents = [
        from_name(f"{field}.documents[{i}]", name) for i, name in enumerate(message.documents)
    ]
    if "" in documents:
        raise InvalidInput(f"{field}.documents", "has an empty id", "send ids of documents")
    if documents and not message.domain:
        raise InvalidInput(f"{field}.domain", "is missing", "send the domain of the documents")
    if message.domain and not documents and (message.chunks or message.variants):
        raise InvalidInput(
            f"{field}.domain",
            "comes with chunks or variants and without documents",
            "leave it out, or send it alone to delete the whole domain",
        )
    if not (message.chunks or message.variants or message.domain):
        raise InvalidInput(field, "names nothing", "send chunks, variants, documents or a domain")
    return Deletion(
        id=_from_id(f"{field}.id", message.id),
        chunks=from_chunks(f"{field}.chunks", message.chunks),
        variants=tuple(from_keys(f"{field}.variants", message.variants)),
        documents=tuple(documents),
        domain=from_name(f"{field}.domain", message.domain),
        made_at_ms=message.made_at_ms,
    )


def to_pull_positions(positions: Mapping[bytes, int]) -> list[pb.PullPosition]:
    """Convert the sequences up to which the deletes of other stores are pulled."""
    return [pb.PullPosition(store=store, sequence=at) for store, at in positions.items()]


def from_pull_positions(field: str, messages: Sequence[pb.PullPosition]) -> dict[bytes, int]:
    """Read the sequences up to which deletes are pulled. Raises InvalidInput, TooLarge."""
    check_count(field, len(messages))
    return {
        _from_id(f"{field}[{i}].store", message.store): message.sequence
        for i, message in enumerate(messages)
    }


def to_deletion_batch(batch: DeletionBatch) -> pb.DeletionBatch:
    """Convert the deletes that another store pulls."""
    return pb.DeletionBatch(
        store=batch.store,
        sequence=batch.sequence,
        incomplete=batch.incomplete,
        deletions=map(to_deletion, batch.deletions),
    )


def from_deletion_batch(message: pb.DeletionBatch) -> DeletionBatch:
    """Read the deletes that another store sent. Raises InvalidInput, TooLarge."""
    return DeletionBatch(
        store=_from_id("store", message.store),
        sequence=message.sequence,
        incomplete=message.incomplete,
        deletions=tuple(
            [from_deletion(f"deletions[{i}]", one) for i, one in enumerate(message.deletions)]
        ),
    )


def checked_hello(message: pb.HelloReply) -> pb.HelloReply:
    """Return the identity of a store, with its ids checked. Raises InvalidInput."""
    _from_id("boot", message.boot)
    _from_id("store", message.store)
    return message
