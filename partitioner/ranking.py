"""Candidates by the time of their step: which plan wins, and what every other one would have taken."""

from collections.abc import Sequence
from dataclasses import dataclass

from dpart.partitioner.candidates import Candidate, Wanted
from dpart.partitioner.evaluate import Evaluation, Evaluator, Shape
from dpart.partitioner.simulate import Timeline


@dataclass(frozen=True)
class Entry:
    """A candidate that fits, with its step played through, and what that takes."""

    candidate: Candidate
    evaluation: Evaluation
    timeline: Timeline
    step_seconds: float


@dataclass(frozen=True)
class Ranked:
    """The outcome.

    Attributes:
        winner: None if no wanted candidate fits.
        others: The rest of those that fit, the fastest first, baselines even where they are the winner.
        best_objective_seconds: The smallest of any wanted candidate that fits.
        rejected: Those that do not fit in memory.
    """

    winner: Entry | None
    best_objective_seconds: float
    others: tuple[Entry, ...]
    rejected: tuple[tuple[Candidate, Evaluation], ...]


def rank(evaluator: Evaluator, candidates: Sequence[Candidate], wanted: Wanted) -> Ranked:
    """Evaluates all candidates; of plans that are equal the first one counts.

    Ties in the time of a step, to one in a million, go to fewer devices, then to fewer stages, then to less sharding
    and recomputation.
    """
    fitting: list[tuple[Candidate, Evaluation]] = []
    rejected: list[tuple[Candidate, Evaluation]] = []
    seen: set[Shape] = set()
    for candidate in candidates:
        if candidate.shape in seen:
            continue
        seen.add(candidate.shape)
        if max(stage.num_replicas for stage in candidate.shape) > evaluator.terms.num_microbatches:
            continue
        if not evaluator.packs(candidate.shape):
            continue
        evaluation = evaluator.evaluate(candidate.shape)
        (rejected if evaluation.short_bytes else fitting).append((candidate, evaluation))
    best_objective = min((e.objective_seconds for _, e in fitting if wanted.allows(e.stages)), default=float("inf"))
    fitting.sort(key=lambda pair: (not pair[0].reported, pair[1].busy_seconds))
    entries: list[Entry] = []
    fastest = float("inf")
    for candidate, evaluation in fitting:
        if not candidate.reported and evaluation.busy_seconds > fastest:
            continue
        timeline = evaluator.play(evaluation)
        entries.append(Entry(candidate, evaluation, timeline, evaluator.step_seconds(timeline)))
        if wanted.allows(evaluation.stages):
            fastest = min(fastest, entries[-1].step_seconds)
    entries.sort(key=lambda e: e.step_seconds)
    equal = [e for e in entries if wanted.allows(e.evaluation.stages) and e.step_seconds <= fastest * (1 + 1e-6)]
    winner = min(equal, key=_plainness, default=None)
    others = tuple(e for e in entries if e is not winner or e.candidate.baseline)
    return Ranked(winner, best_objective, others, tuple(rejected))


def _plainness(entry: Entry) -> tuple[int, int, int, int]:
    stages = entry.evaluation.stages
    sharded = sum(stage.optimizer_sharding for stage in stages)
    return entry.evaluation.num_devices, len(stages), sharded, sum(len(stage.recompute) for stage in stages)
