"""What is named where no plan fits: constraints that cannot hold together, each of which is needed for that."""

import dataclasses
import random
from collections.abc import Callable

import pytest
from full_space import FullSpace, Row

from dpart.partitioner.candidates import Space, Wanted
from dpart.partitioner.cost import Terms
from dpart.partitioner.evaluate import Evaluator
from dpart.partitioner.ilp_conflicts import Conflict, conflict
from dpart.partitioner.plan import Pin
from dpart.partitioner.prices import Freedom
from dpart.partitioner.setting import Setting
from dpart.partitioner.topology import Device, Level, Topology
from dpart.partitioner.units import format_bytes
from dpart.profiler.profile import Profile

GiB = 2**30
NO_LIMIT = 2**50
MANY = 36
"""Enough devices for any plan of three layers, three microbatches and degree 4."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A question with every constraint that a conflict may name."""

    profile: Profile
    num_devices: int
    num_microbatches: int
    schedule: str
    memory_limit_bytes: int
    freedom: Freedom
    wanted: Wanted
    together: tuple[tuple[str, ...], ...]

    @property
    def terms(self) -> Terms:
        return Terms(self.num_microbatches, self.schedule, "adam", self.memory_limit_bytes)  # type: ignore[arg-type]

    @property
    def topology(self) -> Topology:
        return Topology(Device("cpu", GiB), (Level("machine", self.num_devices, 1e10, 1e-5),))

    @property
    def degrees(self) -> str:
        return (
            f"tensor-parallel degree{'s' * (self.freedom.degrees != (1,))} {', '.join(map(str, self.freedom.degrees))}"
        )

    @property
    def setting(self) -> Setting:
        space = Space(self.profile, self.topology, self.terms, together=self.together)
        evaluator = Evaluator(self.profile, self.topology, self.terms, 1.0)
        return Setting(space, self.freedom, self.wanted, evaluator)

    def only(self, named: tuple[str, ...]) -> "Case":
        """The question with these constraints alone."""
        wanted = self.wanted

        def has(words: str) -> bool:
            return words in named

        count = self.num_devices
        return Case(
            self.profile,
            count if has(f"{count} devices") or has("1 device") else MANY,
            self.num_microbatches,
            self.schedule if has("schedule gpipe") else "1f1b",
            self.memory_limit_bytes if has(f"memory limit {format_bytes(self.memory_limit_bytes)}") else NO_LIMIT,
            Freedom(
                self.freedom.degrees if has(self.degrees) else (1, 2, 4)[: count // 2 + 1],
                (0,) if has("no sharding") else (0, 1, 2, 3),
                not has("no recomputation"),
            ),
            Wanted(
                wanted.num_stages if any(words.startswith("exactly") for words in named) else None,
                wanted.max_stages if any(words.startswith("at most") for words in named) else None,
                wanted.replicas if any(words.startswith("replicas") for words in named) else None,
                tuple(pin for pin in wanted.pins if has(f"{pin.layer} in stage {pin.stage}")),
            ),
            tuple(group for group in self.together if has(f"{' and '.join(group)} kept together")),
        )

    def fits(self) -> bool:
        """By trying every plan."""
        space = FullSpace(self.profile, self.topology, self.terms, self.freedom, self.together)
        wanted = self.wanted
        stages = [wanted.num_stages] if wanted.num_stages else range(1, (wanted.max_stages or len(space.names)) + 1)

        def keeps(row: Row) -> bool:
            return all(
                pin.stage + 1 < len(row) and space.names.index(pin.layer) in row[pin.stage + 1] - row[pin.stage]
                for pin in wanted.pins
            )

        best = space.best(list(stages), replicas=lambda found: wanted.replicas in (None, found), pins=keeps)
        return best.shape is not None


def draw(seed: int, make: Callable[..., Profile]) -> Case:
    rng = random.Random(seed)
    profile = make(seed, 3)
    names = [layer.name for layer in profile.graph.layers]
    wanted = Wanted(
        **rng.choice([{}, {}, {"num_stages": rng.randint(1, 3)}, {"max_stages": rng.randint(1, 2)}]),
        replicas=tuple(rng.randint(1, 2) for _ in range(rng.randint(1, 3))) if rng.random() < 0.2 else None,
        pins=tuple(Pin(name, rng.randint(0, 1)) for name in rng.sample(names, rng.choice([0, 0, 1, 2]))),
    )
    freedom = Freedom(rng.choice([(1,), (1, 2)]), rng.choice([(0,), (0, 1, 2, 3)]), rng.random() < 0.5)
    together = tuple(tuple(rng.sample(names, 2)) for _ in range(rng.choice([0, 0, 1])))
    case = Case(
        profile, 2 * rng.randint(1, 2), rng.randint(1, 3), rng.choice(["1f1b", "gpipe"]), NO_LIMIT, freedom, wanted,
        together,
    )  # fmt: skip
    # What the model takes on one device, or less: what a plan needs is somewhere there.
    whole = FullSpace(profile, case.topology, case.terms, Freedom((1,), (0,), False)).least_bytes([1])
    return dataclasses.replace(case, memory_limit_bytes=int(whole * rng.choice([0.2, 0.4, 0.6, 0.8, 1.0, 1.2])))


def test_what_is_named_cannot_hold_and_every_part_of_it_is_needed(split_profile: Callable[..., Profile]) -> None:
    conflicts, sizes = 0, []
    for seed in range(150):
        case = draw(seed, split_profile)
        found = conflict(case.setting)
        assert (found is None) == case.fits(), seed
        if found is None:
            continue
        conflicts += 1
        sizes.append(len(found.constraints))
        assert found.minimal, seed
        assert not case.only(found.constraints).fits(), seed
        for words in found.constraints:
            rest = tuple(other for other in found.constraints if other != words)
            assert case.only(rest).fits(), (seed, words)
    assert conflicts > 50
    assert len(set(sizes)) >= 3 and max(sizes) >= 3


def test_a_cure_is_enough_alone(split_profile: Callable[..., Profile]) -> None:
    cures = 0
    for seed in range(260, 320):
        case = draw(seed, split_profile)
        found = conflict(case.setting)
        everything = _all_words(case)
        for words in found.constraints if found else ():
            others = tuple(other for other in everything if not words.startswith(other))
            assert found is not None
            alone = case.only(others).fits()
            assert alone == (words in found.cures), (seed, words)
            cures += alone
    assert cures > 15


def _all_words(case: Case) -> tuple[str, ...]:
    """More than there are does no harm."""
    return (
        f"memory limit {format_bytes(case.memory_limit_bytes)}",
        f"{case.num_devices} devices",
        *(["schedule gpipe"] if case.schedule == "gpipe" else []),
        case.degrees,
        *(["no sharding"] if case.freedom.shardings == (0,) else []),
        *(["no recomputation"] if not case.freedom.recompute else []),
        "exactly",
        "at most",
        "replicas",
        *(f"{pin.layer} in stage {pin.stage}" for pin in case.wanted.pins),
        *(f"{' and '.join(group)} kept together" for group in case.together),
    )


def test_the_message_lists_what_to_loosen(chain_profile: Callable[..., Profile]) -> None:
    """Six equal layers, one stage asked for, on devices that hold half of them."""
    profile = chain_profile([1e-3] * 6, parameter_bytes=2**26)
    freedom = Freedom((1,), (0,), False)
    case = Case(profile, 4, 4, "1f1b", 2**30, freedom, Wanted(max_stages=1), ())
    found = conflict(case.setting)
    assert found is not None
    assert found.sentence == (
        "These cannot hold together: memory limit 1.00 GiB; no sharding; at most 1 stage. "
        "Without any one of them there are plans."
    )


def test_out_of_time_the_conflict_is_not_called_minimal(chain_profile: Callable[..., Profile]) -> None:
    profile = chain_profile([1e-3] * 6, parameter_bytes=2**26)
    case = Case(profile, 4, 4, "1f1b", 2**30, Freedom((1,), (0,), False), Wanted(max_stages=1), ())
    found = conflict(case.setting, time_limit_seconds=0.0)
    assert found is not None and not found.minimal and not found.cures
    assert found.sentence.startswith("These, or some of them, cannot hold together: memory limit 1.00 GiB; 4 devices;")


def test_with_equal_replicas_only_a_conflict_may_be_larger(split_profile: Callable[..., Profile]) -> None:
    """What no plan keeps no plan of equal replicas keeps."""
    both = 0
    for seed in range(30):
        case = draw(seed, split_profile)
        if case.wanted.replicas is not None and len(set(case.wanted.replicas)) > 1:
            continue
        any_replicas, equal = conflict(case.setting), conflict(case.setting, equal=True)
        if any_replicas is not None:
            assert equal is not None
            both += 1
    assert both > 6


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (Conflict(("memory limit 1.00 GiB",), True, ("memory limit 1.00 GiB",)), "This cannot hold for any plan: "),
        (Conflict(("a", "b"), True, ()), "These cannot hold together: a; b."),
        (Conflict(("a", "b"), True, ("b",)), "These cannot hold together: a; b. Without b there are plans."),
    ],
)
def test_sentences(found: Conflict, sentence: str) -> None:
    assert found.sentence.startswith(sentence)
