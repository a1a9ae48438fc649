"""A small set of documents, and conversations whose last question refers to earlier turns.

Written by hand for the rules of query rewriting. Half of the conversations change the topic with a
question that stands alone, so that rules that always add words lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DOCUMENTS: Final[dict[str, str]] = {
    "billing": "The billing service runs in region eu-north. Team Ledger owns it and answers its "
    "alerts. It stores invoices in PostgreSQL and has done so since 2021.",
    "search": "The search service runs in region us-west. Team Compass owns it. Its index is built "
    "every night and kept in OpenSearch.",
    "payments": "The payments service runs in two regions, eu-north and eu-south. Team Till owns "
    "it. Card data is kept in a vault, and keys are changed every 90 days.",
    "mail": "The mail service sends newsletters and receipts. Team Herald owns it. It retries a "
    "message for three days, then it reports a bounce.",
    "login": "The login service issues tokens that are valid for one hour. Team Gate owns it. "
    "Sessions end after two weeks without use.",
    "reports": "The reporting service makes monthly summaries for finance. Team Ledger owns it. "
    "Its jobs run on the first day of each month at 04:00.",
    "vacation": "Employees have 28 days of vacation each year. Unused days expire at the end of "
    "March. Requests go to the manager two weeks ahead.",
    "travel": "Trips are booked through the travel desk. Trains are preferred below 600 km. Hotels "
    "cost at most 140 euros for a night.",
    "expenses": "Expenses are paid back within 30 days. Receipts are uploaded in the finance "
    "portal. Amounts over 500 euros need the approval of a director.",
    "laptop": "Every employee gets a laptop that is replaced after four years. Broken screens are "
    "repaired by the service desk in Berlin.",
    "vpn": "The VPN is needed outside of the office. It uses WireGuard and a hardware key. Lost "
    "keys are blocked by the service desk.",
    "backup": "Databases are backed up every six hours. Copies are kept for 35 days in another "
    "region. A restore is tested every quarter.",
    "oncall": "An engineer on call answers an alert within 15 minutes. A shift lasts one week. "
    "Each shift is paid with 300 euros.",
    "deploy": "Deployments go through the pipeline called Conveyor. They are frozen from December "
    "20 to January 3. A rollback takes five minutes.",
    "incident": "An incident gets a commander and a channel. A review is written within five days. "
    "Customers are told on the status page.",
    "parental": "Parental leave can be taken for up to 14 months. It is announced seven weeks "
    "ahead. The position is kept open.",
    "office": "The office in Berlin is open from 7:00 to 22:00. Visitors are registered at the "
    "front desk. The roof terrace is closed in winter.",
    "training": "Every employee may spend 2,000 euros a year on training. Courses are approved by "
    "the manager. Books do not need an approval.",
    "data": "Personal data is deleted after 24 months. The privacy team does it. "
    "Requests of customers are answered within 30 days.",
    "contracts": "Contracts are signed by two directors. The legal team keeps them for ten years. "
    "A supplier is reviewed before each renewal.",
}


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A conversation, and the document that answers its last question."""

    turns: tuple[tuple[str, str], ...]
    question: str
    document: str


def _said(question: str, answer: str, last: str, document: str) -> FollowUp:
    return FollowUp((("user", question), ("assistant", answer)), last, document)


FOLLOW_UPS: Final = (
    _said("Where does the billing service run?", "In eu-north.", "And who owns it?", "billing"),
    _said(
        "Which database has the billing service?", "PostgreSQL.", "Since when does it use that?",
        "billing",
    ),
    _said("Who owns the search service?", "Team Compass.", "Where does it run?", "search"),
    _said("Where is search hosted?", "In us-west.", "How often is its index built?", "search"),
    _said(
        "Which team owns payments?", "Team Till.", "In which regions does it run?", "payments",
    ),
    _said("Who owns the mail service?", "Team Herald.", "How long does it retry?", "mail"),
    _said("What does the login service issue?", "Tokens.", "How long are they valid?", "login"),
    _said("Who runs the login service?", "Team Gate.", "When do its sessions end?", "login"),
    _said(
        "What does the reporting service make?", "Summaries.", "When does it run?", "reports",
    ),
    _said(
        "How many days of vacation do I have?", "28 days.", "And when do they expire?", "vacation",
    ),
    _said("Who approves vacation?", "The manager.", "How far ahead must I ask?", "vacation"),
    _said("How do I book a trip?", "Through the travel desk.", "What about hotels?", "travel"),
    _said(
        "When are expenses paid back?", "Within 30 days.", "What if they are over 500 euros?",
        "expenses",
    ),
    _said("When is my laptop replaced?", "After four years.", "Who repairs it?", "laptop"),
    _said("What does the VPN use?", "WireGuard.", "And if I lose the key?", "vpn"),
    _said("How often are databases backed up?", "Every six hours.", "How long are the copies kept?",
          "backup"),
    _said("How long is an on-call shift?", "One week.", "How is it paid?", "oncall"),
    _said("What is the deployment pipeline called?", "Conveyor.", "When is it frozen?", "deploy"),
    _said("Who leads an incident?", "A commander.", "When is the review written?", "incident"),
    _said("How long is parental leave?", "Up to 14 months.", "When must I announce it?",
          "parental"),
    _said("When is the Berlin office open?", "From 7:00.", "And the terrace there?", "office"),
    _said("What may I spend on training?", "2,000 euros.", "Do books need approval?", "training"),
    _said("Who deletes personal data?", "The privacy team.", "When do they delete it?", "data"),
    _said("Who signs contracts?", "Two directors.", "For how long are they kept?", "contracts"),
    FollowUp(
        (
            ("user", "Where does the payments service run?"),
            ("assistant", "In eu-north and eu-south."),
            ("user", "Who owns it?"),
            ("assistant", "Team Till."),
        ),
        "How often are its keys changed?",
        "payments",
    ),
    FollowUp(
        (
            ("user", "Where does billing run?"),
            ("assistant", "In eu-north."),
            ("user", "Where does the search service run?"),
            ("assistant", "In us-west."),
        ),
        "Who owns it?",
        "search",
    ),
)  # fmt: skip
"""Conversations whose last question needs the turns before it."""

NEW_TOPICS: Final = (
    _said("Where does the billing service run?", "In eu-north.", "How many days of vacation do "
          "employees have?", "vacation"),
    _said("Who owns the search service?", "Team Compass.", "When is the office in Berlin open?",
          "office"),
    _said("How long is parental leave?", "Up to 14 months.", "Which region does the search service "
          "run in?", "search"),
    _said("Who signs contracts?", "Two directors.", "How long are login tokens valid?", "login"),
    _said("What does the VPN use?", "WireGuard.", "How often are databases backed up?", "backup"),
    _said("When are expenses paid back?", "Within 30 days.", "Which team owns the mail service?",
          "mail"),
    _said("How do I book a trip?", "Through the travel desk.", "When are deployments frozen?",
          "deploy"),
    _said("When is my laptop replaced?", "After four years.", "How much may I spend on training?",
          "training"),
    _said("Which team owns payments?", "Team Till.", "Is there a limit for hotels on trips?",
          "travel"),
    _said("Who leads an incident?", "A commander.", "What happens with personal data that is old?",
          "data"),
)  # fmt: skip
"""Conversations whose last question stands alone."""
