"""Words and phrasings of the invented company's service handbook.

Everything a document or a question can say is listed here; `handbook` only deals the cards.
Statements put the cue before the value ("is owned by {v}", never "{v} owns it"), because a
causal model reads the value knowing which attribute it belongs to.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAME_HEADS = _words(
    "Kel Mir Tor Dun Fen Gal Hal Jor Lor Mor Nor Pel Ral Sel Tam Ul Var Wen Yor Zan Bren Cor "
    "Drav Elm Fal Grim Hol Isk Jun Kor Lun Mel Nim Orl Pryd Quel Rud Sorn Thal Vex"
)
NAME_TAILS = _words(
    "vane bury mont brook wick ford gate holm mere shaw stead tide vale ward zor fen bane "
    "cliff mead fax garth heim kirk rock march nock pike quay rith spire thorp vik worth yard "
    "beck croft glen firth grove hurst"
)
NAME_SECONDS = _words(
    "Torrin Osmer Relvo Harbek Tolan Vessk Quorn Ibrel Madrow Penfold Caskar Dovrel Emrys "
    "Fathom Gantry Hollis Ingot Jasper Kestrel Lantos Mundo Nacre Orbel Pallas Quiver Rostrum "
    "Saffron Tessel Umber Vellum Wexler Xanto Yarrow Zephyr Almond Basalt Cinder Dapple Ember "
    "Fennel Garnet Hazel Indigo Juniper Kernel Lattice Marble Nimbus Opal Pewter Quartz Raven "
    "Sable Thistle Ultra Violet Willow Xenon Yonder Zircon"
)

NAME_SLOTS = (NAME_HEADS, NAME_TAILS, NAME_SECONDS)
"""The pieces a service name such as "Kelvane Torrin" is made of: head, tail, second word."""

NAME = re.compile(rf"({'|'.join(NAME_HEADS)})({'|'.join(NAME_TAILS)}) ({'|'.join(NAME_SECONDS)})")
"""Matches a service name; one group a slot."""

PURPOSES = (
    "invoice matching",
    "parcel tracking",
    "seat reservations",
    "price quotes",
    "fraud screening",
    "label printing",
    "stock counting",
    "route planning",
    "refund handling",
    "address lookup",
    "photo storage",
    "meter readings",
    "ticket sales",
    "customer surveys",
    "loyalty points",
    "tax reports",
    "warehouse alarms",
    "courier rosters",
    "newsletter delivery",
    "contract archiving",
)

OPENERS = (
    "This page describes {name}, the service for {purpose}.",
    "The service {name} takes care of {purpose}.",
    "At our company {name} is the service behind {purpose}.",
    "We built {name} for {purpose}.",
    "The handbook entry for {name} covers {purpose}.",
)

CALLERS = (
    "Callers: {names}.",
    "It is called by {names}.",
    "Requests come from {names}.",
    "It is used by {names}.",
)

FILLERS = (
    "Its dashboards are reviewed each quarter.",
    "New engineers read this page first.",
    "The service has no known defects.",
    "Changes go through the usual review.",
    "It passed the last audit without remarks.",
    "Its documentation is kept up to date.",
    "Incidents are discussed in the weekly meeting.",
    "The service is tested before each change.",
    "Nothing else is unusual about it.",
    "It was moved to the new platform without trouble.",
)

SUBJECTS = ("It", "It", "It", "The service", "This service")
PREFIXES = ("Today it", "At present it", "For now it", "By agreement it")

_TEAM_WORDS = _words(
    "Rowan Falcon Copper Harbor Meadow Granite Otter Beacon Maple Comet Anchor Badger Cobalt "
    "Dune Elder Flint Glacier Heron Island Jade Kiwi Lotus Mango Nectar Onyx Prairie Quill "
    "River Summit Tundra"
)
_TEAM_KINDS = ("Squad", "Crew", "Guild", "Group", "Circle")
_FIRST_NAMES = _words(
    "Ines Bruno Clara Dmitri Elena Farid Greta Hugo Irene Jonas Karin Liam Mona Nadia Oscar "
    "Paula Quentin Rosa Stefan Tara Ursula Victor Wanda Yusuf"
)
_LAST_NAMES = _words(
    "Halloran Abbott Becker Castell Duarte Eriksen Fontaine Grant Hansen Ivanov Jensen Keller "
    "Larsen Moreau Novak Okafor Petrov Quist Romero Santos Tanaka Ullman Vargas Weber"
)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DAY_PARTS = ("morning", "evening", "night")
_MONTHS = _words(
    "January February March April May June July August September October November December"
)
_COLORS = _words(
    "amber blue crimson green ivory lilac olive pink purple scarlet silver teal white yellow"
)
_OBJECTS = _words(
    "lantern anvil bridge candle drum engine feather hammer kettle ladder mirror needle "
    "paddle rocket saddle tunnel"
)


def _digits(rng: Random, count: int) -> str:
    """A number of `count` different digits, the first not zero.

    Digits are one token each; a repeated digit would make "what follows this digit" ambiguous
    for a model that copies one token at a time.
    """
    first = rng.choice("123456789")
    return first + "".join(rng.sample([d for d in "0123456789" if d != first], count - 1))


def _one_of(*values: str) -> Callable[[Random], str]:
    return lambda rng: rng.choice(values)


@dataclass(frozen=True)
class Attribute:
    """One kind of fact: how to draw a value, state it, ask for it and mention it in an answer."""

    key: str
    draw: Callable[[Random], str]
    predicates: tuple[str, ...]
    """Verb phrases that follow the subject: "runs in region {v}"."""
    possessives: tuple[str, ...]
    """Noun phrases that follow "Its": "home region is {v}"."""
    questions: tuple[str, ...]
    """Questions over the noun phrase {s}, which never starts the question."""
    bridge: str
    """How a two-step answer leads to the value: "in region"."""


DEPENDENCY = "dependency"

ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        DEPENDENCY,
        lambda rng: "",  # dealt by the handbook: another service's name
        ("depends on {v}", "calls {v}", "relies on {v}", "sends its requests to {v}"),
        ("upstream dependency is {v}", "only dependency is {v}"),
        (
            "Which service does {s} depend on?",
            "What does {s} depend on?",
            "Which service does {s} call?",
            "What does {s} rely on?",
            "What is the dependency of {s}?",
        ),
        "depending on",
    ),
    Attribute(
        "owner",
        lambda rng: f"{rng.choice(_TEAM_WORDS)} {rng.choice(_TEAM_KINDS)}",
        ("is owned by {v}", "belongs to {v}", "is maintained by {v}"),
        ("owner is {v}", "owning team is {v}"),
        (
            "Which team owns {s}?",
            "Who owns {s}?",
            "What is the owning team of {s}?",
            "Who maintains {s}?",
        ),
        "owned by",
    ),
    Attribute(
        "region",
        lambda rng: (
            f"{rng.choice(('eu', 'us', 'ap', 'sa', 'af'))}-"
            f"{rng.choice(('north', 'south', 'east', 'west', 'central'))}-{rng.randint(1, 9)}"
        ),
        ("runs in region {v}", "is deployed in {v}", "is hosted in {v}"),
        ("home region is {v}", "region is {v}"),
        (
            "Which region does {s} run in?",
            "Where is {s} hosted?",
            "In which region is {s} deployed?",
            "What is the home region of {s}?",
        ),
        "in region",
    ),
    Attribute(
        "language",
        _one_of(
            *_words("Rust Go Kotlin Java Python Scala Erlang Swift Ruby Haskell Perl Julia Elixir"),
        ),
        ("is written in {v}", "is implemented in {v}", "is programmed in {v}"),
        ("programming language is {v}", "code is in {v}"),
        (
            "Which language is {s} written in?",
            "What is {s} implemented in?",
            "Which programming language does {s} use?",
            "What language is the code of {s} in?",
        ),
        "written in",
    ),
    Attribute(
        "database",
        _one_of(
            *_words(
                "Postgres MariaDB Cassandra Redis MongoDB Oracle SQLite Couchbase Neo4j "
                "Vertica Cockroach Scylla"
            ),
        ),
        ("stores its data in {v}", "keeps its records in {v}", "writes to the database {v}"),
        ("database is {v}", "data store is {v}"),
        (
            "Which database does {s} use?",
            "Where does {s} store its data?",
            "Where does {s} keep its records?",
            "What is the data store of {s}?",
        ),
        "storing data in",
    ),
    Attribute(
        "port",
        lambda rng: _digits(rng, 4),
        ("listens on port {v}", "accepts traffic on port {v}", "is reached on port {v}"),
        ("port is {v}", "port number is {v}"),
        (
            "Which port does {s} listen on?",
            "On which port does {s} accept traffic?",
            "What is the port number of {s}?",
            "On what port is {s} reached?",
        ),
        "on port",
    ),
    Attribute(
        "on_call",
        lambda rng: f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}",
        ("pages {v}", "has as its on-call engineer {v}", "alerts {v}"),
        ("on-call engineer is {v}", "first contact is {v}"),
        (
            "Who is on call for {s}?",
            "Who is the on-call engineer of {s}?",
            "Whom does {s} page?",
            "Who is the first contact for {s}?",
        ),
        "on call",
    ),
    Attribute(
        "maintenance",
        lambda rng: f"{rng.choice(_WEEKDAYS)} {rng.choice(_DAY_PARTS)}",
        ("is patched on {v}", "goes down for maintenance on {v}", "is restarted on {v}"),
        ("maintenance window is {v}", "patch window is {v}"),
        (
            "When is {s} patched?",
            "What is the maintenance window of {s}?",
            "When does {s} go down for maintenance?",
            "When is {s} restarted?",
        ),
        "patched on",
    ),
    Attribute(
        "criticality",
        _one_of("critical", "high", "moderate", "low", "minimal", "severe", "normal", "essential"),
        ("has the criticality {v}", "is rated as {v}", "is classed as {v}"),
        ("criticality is {v}", "rating is {v}"),
        (
            "What is the criticality of {s}?",
            "How critical is {s}?",
            "What is {s} rated as?",
            "How is {s} classed?",
        ),
        "rated as",
    ),
    Attribute(
        "retention",
        lambda rng: f"{_digits(rng, 2)} days",
        ("keeps logs for {v}", "retains its logs for {v}", "deletes logs after {v}"),
        ("log retention is {v}", "logs are kept for {v}"),
        (
            "How long does {s} keep logs?",
            "What is the log retention of {s}?",
            "For how long does {s} retain its logs?",
            "When does {s} delete logs?",
        ),
        "keeping logs for",
    ),
    Attribute(
        "channel",
        lambda rng: f"{rng.choice(_COLORS)}-{rng.choice(_OBJECTS)}",
        ("is discussed in the channel {v}", "takes questions in the channel {v}"),
        ("support channel is {v}", "chat channel is {v}"),
        (
            "Which channel is for {s}?",
            "What is the support channel of {s}?",
            "In which channel does {s} take questions?",
            "In which chat channel is {s} discussed?",
        ),
        "in channel",
    ),
    Attribute(
        "cadence",
        _one_of(
            "daily",
            "weekly",
            "monthly",
            "hourly",
            "yearly",
            "twice a week",
            "every two weeks",
            "every quarter",
            "on demand",
        ),
        ("is released {v}", "ships a release {v}", "gets new versions {v}"),
        ("release cadence is {v}", "releases happen {v}"),
        (
            "How often is {s} released?",
            "What is the release cadence of {s}?",
            "How often does {s} ship a release?",
            "How often does {s} get new versions?",
        ),
        "released",
    ),
    Attribute(
        "latency",
        lambda rng: f"{_digits(rng, 3)} ms",
        ("answers within {v}", "responds within {v}", "promises a response in {v}"),
        ("latency target is {v}", "response time is {v}"),
        (
            "What is the latency target of {s}?",
            "How fast does {s} answer?",
            "Within what time does {s} respond?",
            "What is the response time of {s}?",
        ),
        "answering within",
    ),
    Attribute(
        "launch",
        lambda rng: f"{rng.choice(_MONTHS)} {rng.randint(2013, 2019)}",
        ("was launched in {v}", "went live in {v}", "started in {v}"),
        ("launch date is {v}", "first release was in {v}"),
        (
            "When was {s} launched?",
            "When did {s} go live?",
            "When did {s} start?",
            "What is the launch date of {s}?",
        ),
        "launched in",
    ),
    Attribute(
        "auth",
        _one_of(
            "mutual TLS",
            "signed tokens",
            "API keys",
            "OAuth",
            "Kerberos",
            "client certificates",
            "shared secrets",
            "passwords",
            "smart cards",
        ),
        ("authenticates callers with {v}", "checks callers with {v}", "demands {v}"),
        ("login method is {v}", "authentication method is {v}"),
        (
            "How does {s} authenticate callers?",
            "What is the login method of {s}?",
            "What does {s} demand of callers?",
            "Which authentication method does {s} use?",
        ),
        "authenticating with",
    ),
    Attribute(
        "backup",
        _one_of(
            *_words(
                "Oslo Lisbon Vienna Dublin Madrid Helsinki Athens Prague Warsaw Zurich Milan "
                "Porto Geneva Malmo Cork Bergen Tallinn Riga Vilnius Sofia"
            ),
        ),
        ("is backed up to {v}", "sends nightly backups to {v}", "copies its backups to {v}"),
        ("backup site is {v}", "backups are kept in {v}"),
        (
            "Where is {s} backed up to?",
            "What is the backup site of {s}?",
            "Where are the backups of {s} kept?",
            "Where does {s} send nightly backups?",
        ),
        "backed up to",
    ),
    Attribute(
        "queue",
        _one_of(
            *_words("Kafka RabbitMQ Pulsar NATS ActiveMQ ZeroMQ Kinesis Celery Mosquitto"),
        ),
        ("publishes events to {v}", "sends its events to {v}", "uses the message bus {v}"),
        ("message bus is {v}", "events go to {v}"),
        (
            "Which message bus does {s} use?",
            "Where does {s} publish events?",
            "Where do the events of {s} go?",
            "What is the message bus of {s}?",
        ),
        "publishing to",
    ),
    Attribute(
        "cost_center",
        lambda rng: _digits(rng, 4),
        ("is billed to cost center {v}", "is paid for by cost center {v}"),
        ("cost center is {v}", "bills go to cost center {v}"),
        (
            "Which cost center is {s} billed to?",
            "What is the cost center of {s}?",
            "Which cost center pays for {s}?",
            "To which cost center do the bills of {s} go?",
        ),
        "billed to",
    ),
)

BY_KEY = {attribute.key: attribute for attribute in ATTRIBUTES}

REFERENCES = (
    "the service that {name} depends on",
    "the service that {name} calls",
    "the service {name} relies on",
    "the dependency of {name}",
    "the service called by {name}",
)
"""Noun phrases that stand for a service's dependency; put into a question's {s}."""
