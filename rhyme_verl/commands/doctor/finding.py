"""The results of the doctor's checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """The severity of a finding: a FAULT stops the job or its speed-up, a NOTE may be intended."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table.

    Attributes:
        check: topic of the check; several findings may share it.
        remedy: how to fix the problem; empty if there is none.
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
