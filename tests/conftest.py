"""Profiles made by hand, for tests of everything that follows the profiler."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dpart.compiler.graph import Layer, ModelGraph, Parameter, Value
from dpart.profiler.profile import LayerCost, Machine, Profile, SplitCost

MiB = 2**20


@pytest.fixture
def random_profile() -> Callable[..., Profile]:
    """By seed (and ``max_layers``): a few layers as a random graph, with a tied weight, integers and free layers."""
    return _random_profile


@pytest.fixture
def split_profile() -> Callable[..., Profile]:
    """As `random_profile`, and every layer's cost known at tensor-parallel degrees 2 and 4."""
    return lambda seed, max_layers=7: with_splits(_random_profile(seed, max_layers), seed)


@pytest.fixture
def chain_profile() -> Callable[..., Profile]:
    """A chain of layers from their forward seconds; a backward takes twice as long."""
    return _chain_profile


def _random_profile(seed: int, max_layers: int = 7) -> Profile:
    rng = random.Random(seed)
    n = rng.randint(2, max_layers)
    density = rng.choice([0.2, 0.5])
    before = [[p for p in range(i) if (p == i - 1 and rng.random() < 0.6) or rng.random() < density] for i in range(n)]
    users = {f"p{i}": [i] for i in range(n) if rng.random() < 0.8}
    if n > 2 and rng.random() < 0.7:
        users["tied"] = sorted(rng.sample(range(n), rng.randint(2, 3)))
    values = [Value("x", None, ("l0",), (4, 8), "float32", 0, False, 128)]
    for i in range(n):
        readers = tuple(f"l{j}" for j in range(i + 1, n) if i in before[j])
        size = rng.choice([0, 1, 2, 5, 20]) * MiB
        values.append(Value(f"v{i}", f"l{i}", readers, (4,), "float32", 0, rng.random() < 0.8, size))
    parameters = [
        Parameter(name, (), (1,), "float32", rng.choice([1, 4, 16]) * MiB, rng.random() < 0.8, True) for name in users
    ]
    layers = [
        Layer(
            f"l{i}",
            "Layer",
            tuple(f"v{p}" for p in before[i]) or ("x",),
            (f"v{i}",),
            tuple(name for name, used_by in users.items() if i in used_by),
        )
        for i in range(n)
    ]
    seconds = [rng.choice([0.0, 1e-3, 2e-3, rng.uniform(1e-4, 5e-3)]) for _ in range(n)]
    return _profile(layers, values, parameters, seconds, rng)


def with_splits(profile: Profile, seed: int) -> Profile:
    """The profile with costs at degrees 2 and 4: some layers split, some run whole on every rank."""
    rng = random.Random(seed)
    costs = []
    for cost in profile.costs:
        split = rng.random() < 0.8
        reduces = rng.randint(0, 2) if split else 0
        splits = []
        for degree in (2, 4):
            part = degree if split else 1
            less = rng.uniform(1.0, 1.3) / part
            splits.append(
                SplitCost(
                    degree=degree,
                    split="columns" if split else "replicated",
                    forward_seconds=cost.forward_seconds * less,
                    backward_seconds=cost.backward_seconds * less,
                    weight_backward_seconds=cost.backward_seconds * less / 3,
                    parameter_bytes=-(-cost.parameter_bytes // part),
                    trainable_bytes=-(-cost.trainable_bytes // part),
                    stash_bytes=-(-cost.stash_bytes // part) if rng.random() < 0.7 else cost.stash_bytes,
                    workspace_bytes=-(-cost.workspace_bytes // part),
                    forward_reduces=reduces,
                    forward_reduce_bytes=reduces * rng.choice([0, 1, 3]) * MiB // 4,
                    backward_reduces=reduces,
                    backward_reduce_bytes=reduces * rng.choice([0, 1, 3]) * MiB // 4,
                )
            )
        weight = cost.backward_seconds * rng.choice([0.0, 0.5])
        costs.append(replace(cost, weight_backward_seconds=weight, splits=tuple(splits)))
    return replace(profile, costs=tuple(costs))


def _chain_profile(seconds: Sequence[float], *, value_bytes: int = MiB, parameter_bytes: int = MiB) -> Profile:
    n = len(seconds)
    values = [Value("x", None, ("l0",), (4, 8), "float32", 0, False, 128)]
    values += [
        Value(f"v{i}", f"l{i}", (f"l{i + 1}",) if i + 1 < n else (), (4,), "float32", 0, True, value_bytes)
        for i in range(n)
    ]
    parameters = [Parameter(f"p{i}", (), (1,), "float32", parameter_bytes, True, True) for i in range(n)]
    layers = [Layer(f"l{i}", "Layer", (f"v{i - 1}" if i else "x",), (f"v{i}",), (f"p{i}",)) for i in range(n)]
    return _profile(layers, values, parameters, seconds, random.Random(0))


def _profile(
    layers: Sequence[Layer],
    values: Sequence[Value],
    parameters: Sequence[Parameter],
    seconds: Sequence[float],
    rng: random.Random,
) -> Profile:
    graph = ModelGraph(
        "Toy", "f" * 16, 4, ("x",), layers[-1].outputs[0], tuple(values), tuple(parameters), tuple(layers)
    )
    costs = [
        LayerCost(
            layer=layer.name,
            forward_seconds=time,
            backward_seconds=2 * time,
            forward_spread_seconds=0.0,
            backward_spread_seconds=0.0,
            parameter_bytes=sum(graph.parameter[p].size_bytes for p in layer.parameters),
            trainable_bytes=sum(graph.parameter[p].size_bytes * graph.parameter[p].trainable for p in layer.parameters),
            output_bytes=sum(graph.value[v].size_bytes for v in layer.outputs),
            stash_bytes=rng.choice([0, 3, 10]) * MiB,
            workspace_bytes=rng.choice([1, 2, 8]) * MiB,
            repeats=1,
        )
        for layer, time in zip(layers, seconds, strict=True)
    ]  # fmt: skip
    machine = Machine("cpu", 4, 2**30, 1)
    return Profile("dpart.profile", 1, graph, 32, machine, 3 * sum(seconds), tuple(costs))
