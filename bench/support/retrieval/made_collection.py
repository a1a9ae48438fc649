"""A small collection made from templates, with questions of known answers.

Each page describes one service with its own facts. A question asks for one fact, half of them in
other words than the page has.
"""

from __future__ import annotations

import itertools
import random

from bench.support.retrieval.public_collections import TestCollection

NUM_SERVICES = 60
_NAMES = "billing search mail login backup report chat audit quota sync".split()  # noqa: SIM905
_SITES = ("Oslo", "Lima", "Cairo", "Perth", "Quito", "Turin", "Osaka", "Delhi", "Accra", "Minsk")
_STORES = ("PostgreSQL", "Cassandra", "Redis", "SQLite", "Kafka", "etcd", "MinIO", "MySQL")
_FAILURES = (
    ("runs out of disk space", "Its volume is full after"),
    ("loses its connection to the database", "It cannot reach its storage for"),
    ("refuses new logins", "Users cannot sign in for"),
    ("answers slowly", "Its latency is high for"),
    ("restarts again and again", "It crashes in a loop for"),
)
_FACTS = {
    "Where is {name} hosted?": "The {name} service is deployed in the {site} data center.",
    "Which database does {name} use?": "Its records are kept in {store} with {copies} copies.",
    "Who has to be called when {name} has an outage?": (
        "If it {failure}, page the team {team} at once."
    ),
    "How long does it take until {name} alerts?": (
        "{symptom} {minutes} minutes before an alert is raised."
    ),
    "{name} snapshot at {hour} o'clock": "Every night at {hour} o'clock a snapshot is written.",
}


def made_collection(seed: int = 0) -> TestCollection:
    """Return the collection. The same seed gives the same one."""
    source = random.Random(seed)
    documents, queries, grades = {}, {}, {}
    names = source.sample(list(itertools.permutations(_NAMES, 2)), NUM_SERVICES)
    for i, name in enumerate(names):
        failure, symptom = source.choice(_FAILURES)
        facts = {
            "name": " ".join(name),
            "site": source.choice(_SITES),
            "store": source.choice(_STORES),
            "copies": source.randint(2, 9),
            "failure": failure,
            "symptom": symptom,
            "team": f"team-{source.randint(1, 40)}",
            "minutes": source.randint(1, 90),
            "hour": source.randint(0, 23),
        }
        sentences = [sentence.format(**facts) for sentence in _FACTS.values()]
        source.shuffle(sentences)
        documents[str(i)] = f"Page {i}\n{' '.join(sentences)}"
        for j, question in enumerate(source.sample(list(_FACTS), 2)):
            queries[f"{i}:{j}"] = question.format(**facts)
            grades[f"{i}:{j}"] = {str(i): 1}
    return TestCollection(documents, queries, grades)
