"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a check ended: FAULT will stop a job or take the gain away, NOTE may be meant so."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table.

    Attributes:
        check: what was looked at.
        verdict: how it is.
        text: what was found.
        remedy: what to do; empty if all is well.
    """

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Verdict.OK, text)


def note(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Verdict.NOTE, text, remedy)


def fault(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAULT, text, remedy)
