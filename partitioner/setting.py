"""`Setting`: a question and its inputs, made ready for the searches and for the evaluation of plans.

A plan holds its question, so that whoever has the profile can set the same stage again: to check the certificate, or
to play the step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dpart.partitioner.candidates import Space, Wanted
from dpart.partitioner.cost import Optimizer, ScheduleName, Terms
from dpart.partitioner.evaluate import Evaluator
from dpart.partitioner.folding import fold
from dpart.partitioner.plan import Plan, Question
from dpart.partitioner.prices import Freedom
from dpart.partitioner.topology import Topology, parse_topology
from dpart.profiler.profile import Profile


@dataclass(frozen=True)
class Setting:
    """What the searches need.

    Attributes:
        space: All plans.
        freedom: What may be decided besides the cuts.
        wanted: What was asked of a plan's shape.
        evaluator: Gives any plan its numbers.
    """

    space: Space
    freedom: Freedom
    wanted: Wanted
    evaluator: Evaluator


def setting(
    profile: Profile,
    topology: Topology,
    question: Question,
    *,
    optimizer: Optimizer,
    memory_limit_bytes: int,
    schedule: ScheduleName | None = None,
    warm_up_depth: float = 1.0,
    pool_limits_bytes: tuple[int, ...] = (),
    progress: Callable[[str], None] | None = None,
) -> Setting:
    """The setting of a question.

    Args:
        topology: What `question.topology` says.
        schedule: That plans are evaluated under, where it is not the one that is searched for.
        warm_up_depth: The same.
        pool_limits_bytes: Of the devices of each pool, where there are several.
    """
    rows = profile.graph.microbatch_size
    num_microbatches = math.ceil(question.batch_size / rows)
    terms = Terms(
        num_microbatches,
        "1f1b" if question.schedule == "auto" else question.schedule,
        optimizer,
        memory_limit_bytes,
        parameter_itemsize=parameter_itemsize(profile),
        reduce_buckets=question.reduce_buckets,
        context_bytes=question.context_bytes,
        pool_limits_bytes=pool_limits_bytes,
    )
    freedom = Freedom(question.degrees, question.shardings, question.recompute)
    space = Space(fold(profile), topology, terms, progress or (lambda text: None), question.together)
    last_rows = question.batch_size - (num_microbatches - 1) * rows
    return Setting(
        space,
        freedom,
        Wanted(question.num_stages, question.max_stages, question.replicas, question.pins, freedom),
        Evaluator(
            space.profile,
            topology,
            replace(terms, schedule=schedule or terms.schedule, warm_up_depth=warm_up_depth),
            last_rows / rows,
        ),
    )


def setting_of(plan: Plan, profile: Profile, progress: Callable[[str], None] | None = None) -> Setting:
    """The setting in which a plan was made."""
    assert plan.question is not None
    topology = parse_topology(plan.question.topology, "the plan's topology")
    return setting(
        profile,
        topology,
        plan.question,
        schedule=plan.schedule,
        warm_up_depth=plan.warm_up_depth,
        optimizer=plan.optimizer,
        memory_limit_bytes=plan.memory_limit_bytes,
        pool_limits_bytes=plan.pool_limits_bytes,
        progress=progress,
    )


def parameter_itemsize(profile: Profile) -> int:
    """Bytes of a number of the trainable parameters; the smallest, where they differ."""
    counted = [(p.size_bytes, int(np.prod(p.shape))) for p in profile.graph.parameters if p.trainable]
    return max(1, min((size // count for size, count in counted if count), default=4))
