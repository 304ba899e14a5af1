"""Laws of the difference of two plans: stages are matched best, moves lead from one to the other, nothing is lost."""

import io
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from dpart.cli import main
from dpart.partitioner.diff import PlanDiff, diff, match_stages
from dpart.partitioner.diff_table import diff_table
from dpart.partitioner.partition import partition
from dpart.partitioner.plan import Plan, Stage
from dpart.partitioner.topology import Device, Level, Topology
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, write_file

GiB = 2**30
TWO_LEVELS = Topology(Device("cpu", GiB), (Level("host", 2, 8e9, 1e-5), Level("cluster", 2, 1e9, 1e-4)))


def cut(plan: Plan, names: Sequence[str], sizes: Sequence[int]) -> Plan:
    """The plan with these layers, in stages of so many each; its numbers stay those of its first stage."""
    ends = list(itertools.accumulate(sizes))
    stages = [replace(plan.stages[0], layers=tuple(names[end - n : end])) for end, n in zip(ends, sizes, strict=True)]
    return replace(plan, stages=tuple(stages))


def random_sizes(total: int, rng: random.Random) -> list[int]:
    cuts = sorted(rng.sample(range(1, total), rng.randint(0, min(5, total - 1))))
    return [b - a for a, b in itertools.pairwise([0, *cuts, total])]


def most_shared(before: Sequence[Stage], after: Sequence[Stage]) -> int:
    """By trying every way to match stages in order."""
    best = 0
    for n in range(1, min(len(before), len(after)) + 1):
        for rows in itertools.combinations(before, n):
            for columns in itertools.combinations(after, n):
                shared = sum(len(set(a.layers) & set(b.layers)) for a, b in zip(rows, columns, strict=True))
                best = max(best, shared)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_stages_are_matched_best_and_moves_lead_from_plan_to_plan(
    seed: int, chain_profile: Callable[..., Profile]
) -> None:
    rng, plan = random.Random(seed), partition(chain_profile([1e-3]), TWO_LEVELS)
    names = [f"l{i}" for i in range(rng.randint(2, 10))]
    a, b = (cut(plan, names, random_sizes(len(names), rng)) for _ in range(2))
    pairs = match_stages(a.stages, b.stages)
    assert list(pairs.values()) == sorted(pairs.values()) and list(pairs) == sorted(pairs)
    shared = sum(len(set(a.stages[s].layers) & set(b.stages[t].layers)) for s, t in pairs.items())
    assert shared == most_shared(a.stages, b.stages)

    found = diff(a, b)
    where = {name: pairs.get(s) for s, stage in enumerate(a.stages) for name in stage.layers}
    for move in found.moves:
        assert move.layers and all(name in a.stages[move.source or 0].layers for name in move.layers)
        where |= dict.fromkeys(move.layers, move.target)
    assert where == {name: t for t, stage in enumerate(b.stages) for name in stage.layers}
    assert len(names) - sum(len(move.layers) for move in found.moves) == shared
    assert [s.after for s in found.stages if s.after is not None] == list(range(len(b.stages)))
    assert [s.before for s in found.stages if s.before is not None] == list(range(len(a.stages)))
    assert found.is_same == (a == b)


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_does_not_differ_from_itself(seed: int, random_profile: Callable[[int], Profile]) -> None:
    plan = partition(random_profile(seed), TWO_LEVELS)
    assert diff(plan, plan).is_same


def test_the_two_ways_differ_by_the_same(random_profile: Callable[[int], Profile]) -> None:
    profile = random_profile(3)
    a = partition(profile, TWO_LEVELS, num_stages=1)
    b = partition(profile, TWO_LEVELS, num_stages=2, schedule="gpipe", optimizer="sgd")
    there, back = diff(a, b), diff(b, a)
    assert {(d.what, d.before, d.after) for d in there.decisions} == {
        (d.what, d.after, d.before) for d in back.decisions
    }
    seconds = {(c.what, c.before_seconds, c.after_seconds) for c in there.seconds}
    assert seconds == {(c.what, c.after_seconds, c.before_seconds) for c in back.seconds}
    assert ("step", a.step_seconds, b.step_seconds) in seconds
    assert {"stages", "schedule", "optimizer"} <= {d.what for d in there.decisions}


def test_everything_about_a_stage_that_changes_is_there(chain_profile: Callable[..., Profile]) -> None:
    plan = partition(chain_profile([1e-3] * 4), TWO_LEVELS, num_stages=2)
    old = plan.stages[0]
    changed = replace(
        old,
        num_replicas=old.num_replicas + 1,
        tensor_parallel_degree=2,
        optimizer_sharding=3,
        recompute=(old.layers[:1],),
        devices=(*old.devices, 9),
        in_flight=old.in_flight + 1,
        forward_seconds=old.forward_seconds * 2,
        all_reduce_seconds=old.all_reduce_seconds + 1,
        memory=replace(old.memory, stash_bytes=old.memory.stash_bytes + 5),
    )
    found = diff(plan, replace(plan, stages=(changed, *plan.stages[1:])))
    stage = found.stages[0]
    what = ["replicas", "tensor parallel", "ZeRO", "recomputed", "devices", "in flight"]
    assert [d.what for d in stage.decisions] == what
    assert [c.what for c in stage.seconds] == ["forward", "all-reduce"]
    assert [(c.what, c.after_bytes - c.before_bytes) for c in stage.memory] == [("stash", 5), ("total", 5)]
    assert found.moves == () and found.stages[1].is_same


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def test_the_command(tmp_path: Path, chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 2e-3])
    a, b = partition(profile, TWO_LEVELS, num_stages=2), partition(profile, TWO_LEVELS, num_stages=4)
    write_file(a, tmp_path / "a.json")
    write_file(b, tmp_path / "b.json")
    done = run("diff", tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / "diff.json")
    assert done.exit_code == 0, done.output
    for part in ("Layers that moved", "new", "replicas", "step", "total memory"):
        assert part in done.output, part
    assert read_file(PlanDiff, tmp_path / "diff.json") == diff(a, b)
    same = run("diff", tmp_path / "a.json", tmp_path / "a.json")
    assert same.exit_code == 0 and "decide and predict the same" in same.output.replace("\n", " ")
    refused = run("diff", tmp_path / "a.json", tmp_path / "no.json")
    assert refused.exit_code == 1 and "no.json: no such file" in refused.output
    refused = run("diff", tmp_path / "a.json", tmp_path / "b.json", "-o", tmp_path / "a.json")
    assert refused.exit_code == 1 and "exists already" in refused.output


def test_plans_of_other_models(chain_profile: Callable[..., Profile]) -> None:
    plan = partition(chain_profile([1e-3] * 4), TWO_LEVELS, num_stages=1)
    grown = cut(replace(plan, fingerprint="other"), ["l0", "l1", "x", "l2", "l3"], [5])
    found = diff(plan, grown)
    assert not found.same_model and not found.is_same
    assert [(move.layers, move.source, move.target) for move in found.moves] == [(("x",), None, 0)]
    gone = diff(grown, plan)
    assert [(move.layers, move.source, move.target) for move in gone.moves] == [(("x",), 0, None)]
    text = io.StringIO()
    Console(file=text, width=120).print(diff_table(found, "a", "b"))
    assert "different models" in text.getvalue()
    with pytest.raises(UserError, match="no layer in common"):
        diff(plan, cut(plan, ["x", "y"], [2]))
