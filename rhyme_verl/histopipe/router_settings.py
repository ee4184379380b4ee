"""What the router is started with."""

from __future__ import annotations

from dataclasses import dataclass

from rhyme_verl.histopipe.choice import Simulate
from rhyme_verl.histopipe.scheduler import Job


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What the router needs to know about the job.

    Attributes:
        job: settings of the scheduler.
        warmup_batches, samples: batches that the trainer submits ahead (`num_warmup_batches`); answers per group.
        simulate: simulates shapes of units; None: the first one stays.
        log_folder: folder for the log of the schedule; None: no log is written.
        checkpoints: verl's checkpoint folder, with which lengths are saved; None: they are not saved.
        resume_from: checkpoint whose lengths are loaded; None: none are loaded.
    """

    job: Job
    warmup_batches: float = 0.0
    samples: int = 1
    simulate: Simulate | None = None
    log_folder: str | None = None
    checkpoints: str | None = None
    resume_from: str | None = None
