"""What the runtime of this version executes of a plan: all but the decisions listed here."""

from dpart.partitioner.plan import Plan
from dpart.runtime.schedule import EXECUTABLE_SCHEDULES


def not_runnable(plan: Plan) -> list[str]:
    """The decisions of a plan that the runtime does not execute yet, each with the option that leaves it out."""
    found = []
    if any(stage.tensor_parallel_degree > 1 for stage in plan.stages):
        found.append("tensor parallelism (--tensor-parallel 1)")
    if any(stage.recompute for stage in plan.stages):
        found.append("recomputation (--no-recompute)")
    if any(stage.optimizer_sharding for stage in plan.stages):
        found.append("sharded optimizer state (--sharding 0)")
    if plan.optimizer == "adam-mixed":
        found.append("Adam with float32 copies of the parameters (--optimizer adam)")
    if plan.warm_up_depth != 1:
        found.append("a deeper warm-up (--schedule 1f1b)")
    if plan.schedule not in EXECUTABLE_SCHEDULES:
        found.append(f"the {plan.schedule} schedule (--schedule 1f1b)")
    return found
