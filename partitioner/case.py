"""`Case`: a profile, a topology and the options of `partition`, to be planned again with one thing changed.

A plan file has its whole question in it, so a case can be made of a plan as well: the questions are then asked
under the constraints that the plan was made under.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpart.partitioner.certificates import digest
from dpart.partitioner.evaluate import Evaluation, shape_of
from dpart.partitioner.partition import partition
from dpart.partitioner.plan import Plan, Question, Stage
from dpart.partitioner.setting import setting_of
from dpart.partitioner.topology import Topology, local_topology, parse_topology, topology_text
from dpart.partitioner.unlike import allowed_degrees
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError

_ROUNDING = 1e-6

_DEFAULT_MARGIN: float = inspect.signature(partition).parameters["tolerance"].default


@dataclass(frozen=True)
class Kept:
    """A plan's decisions under other numbers than those it was made for.

    Attributes:
        stage_seconds: Per microbatch; the largest is the bottleneck.
        fits: Whether every device has the memory.
    """

    step_seconds: float
    stages: tuple[Stage, ...]
    stage_seconds: tuple[float, ...]
    fits: bool


@dataclass(frozen=True)
class Case:
    """What a plan is asked for.

    Attributes:
        topology: The devices that may be used.
        whole: All devices there are: more, where the options ask for the first few of them.
        options: Of `partition`, the count of devices taken out.
    """

    profile: Profile
    topology: Topology
    whole: Topology
    options: Mapping[str, Any]

    @property
    def margin(self) -> float:
        """By how much a step has to be shorter, as a share, for its plan to be better: what the search tolerates."""
        return float(self.options.get("tolerance", _DEFAULT_MARGIN))

    def plan(self, *, profile: Profile | None = None, topology: Topology | None = None, **changed: Any) -> Plan:
        """The plan, with whatever is given changed.

        Raises:
            UserError: No plan fits, or an option is impossible.
        """
        devices = self.topology if topology is None else topology
        options = dict(self.options) | changed
        if (wanted := options.get("tensor_parallel")) is not None:
            # Of a smaller host only some degrees fill a part; with none of them left, the fault is the caller's.
            options["tensor_parallel"] = [t for t in wanted if devices.group_sizes[0] % t == 0] or wanted
        return partition(self.profile if profile is None else profile, devices, **options)

    def keep(self, plan: Plan, *, profile: Profile | None = None, topology: Topology | None = None) -> Kept:
        """What a plan's decisions come to on another profile or topology.

        Args:
            plan: Made for this case, or for one with other numbers.
            topology: With as many devices as that of the plan, in the same groups.
        """
        assert plan.question is not None, "partition says what was asked"
        question = plan.question
        if topology is not None:
            question = replace(question, topology=topology_text(topology))
        made = setting_of(replace(plan, question=question), self.profile if profile is None else profile)
        evaluation: Evaluation = made.evaluator.evaluate(shape_of(plan.stages))
        step = made.evaluator.step_seconds(made.evaluator.play(evaluation))
        return Kept(step, evaluation.stages, evaluation.stage_seconds, evaluation.short_bytes == 0)


def case_of(profile: Profile, topology: Topology | None, options: Mapping[str, Any]) -> Case:
    """The case of a profile.

    Args:
        topology: None for the machine the profile was measured on.
        options: Of `partition`; `num_devices` among them takes the first few devices.
    """
    whole = local_topology(profile.machine) if topology is None else topology
    rest = dict(options)
    count = rest.pop("num_devices", None)
    return Case(profile, whole if count is None else whole.first(count), whole, rest)


def case_of_plan(plan: Plan, profile: Profile) -> Case:
    """The case that a plan was made for.

    Raises:
        UserError: The plan does not say what was asked, or was made from another profile.
    """
    question = plan.question
    if question is None:
        raise UserError("The plan does not say what was asked: make it again.")
    if question.profile_digest != digest(profile):
        raise UserError(
            f"The plan was made from another profile (SHA-256 {question.profile_digest[:12]}..., this one has "
            f"{digest(profile)[:12]}...): name the right one, or partition again."
        )
    topology = parse_topology(question.topology, "the plan's topology")
    return Case(profile, topology, topology, _options(plan, question, profile, topology))


def same_decisions(a: Plan, b: Plan) -> bool:
    """Whether two plans put the same layers on the same numbers of devices in the same way."""
    same_order = (a.schedule, a.warm_up_depth) == (b.schedule, b.warm_up_depth)
    return same_order and shape_of(a.stages) == shape_of(b.stages)


def is_as_good(kept_seconds: float, best_seconds: float, margin: float = _ROUNDING) -> bool:
    """Whether a step is as fast as another, up to a share of it."""
    return kept_seconds <= best_seconds * (1 + margin)


def _options(plan: Plan, question: Question, profile: Profile, topology: Topology) -> dict[str, Any]:
    known = allowed_degrees(profile, topology, None)
    is_dp = plan.method == "dp"
    return {
        "method": plan.method,
        "schedule": question.schedule,
        "optimizer": plan.optimizer,
        "batch_size": question.batch_size,
        "memory_limit_bytes": plan.pool_limits_bytes or plan.memory_limit_bytes,
        "num_stages": question.num_stages,
        "max_stages": question.max_stages,
        "replicas": question.replicas,
        # All that there are is no constraint: on other devices there may be more.
        "tensor_parallel": None if question.degrees == known else question.degrees,
        "sharding": question.shardings if is_dp else None,
        "recompute": question.recompute if is_dp else True,
        "together": question.together,
        "pins": {pin.layer: pin.stage for pin in question.pins},
        "reduce_buckets": question.reduce_buckets,
    }
