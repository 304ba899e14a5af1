"""`schedule="auto"`: the plans that were found for strict 1F1B, played under other schedules as well.

A deeper warm-up hides the latency of links and stashes more; zero-bubble H1 fills the waiting with gradients of
parameters, where a profile tells them apart. What fits and makes the fastest step is the plan's schedule.
"""

from collections.abc import Sequence
from dataclasses import replace

from dpart.partitioner.cost import Terms
from dpart.partitioner.evaluate import Evaluator, shape_of
from dpart.partitioner.ranking import Entry

_DEPTHS = (1.25, 1.5, 2.0)
_TRIED = 4


def best_schedule(evaluator: Evaluator, entries: Sequence[Entry]) -> tuple[Evaluator, Entry]:
    """The fastest of some plans under any schedule, and the evaluator of that.

    Args:
        entries: Plans that fit under the evaluator's own schedule, the best first; at least one.
    """
    best = (evaluator, entries[0])
    for terms in _alternatives(evaluator.terms, evaluator):
        other = Evaluator(evaluator.profile, evaluator.topology, terms, evaluator.last_microbatch)
        for entry in entries[:_TRIED]:
            if len(entry.evaluation.stages) == 1:
                continue
            evaluation = other.evaluate(shape_of(entry.evaluation.stages))
            if evaluation.short_bytes:
                continue
            timeline = other.play(evaluation)
            seconds = other.step_seconds(timeline)
            if seconds < best[1].step_seconds * (1 - 1e-6):
                best = (other, Entry(entry.candidate, evaluation, timeline, seconds))
    return best


def _alternatives(terms: Terms, evaluator: Evaluator) -> list[Terms]:
    found = [replace(terms, warm_up_depth=depth) for depth in _DEPTHS]
    if any(cost.weight_backward_seconds for cost in evaluator.profile.costs):
        found.append(replace(terms, schedule="zb-h1"))
    return found
