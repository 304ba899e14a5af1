"""Profiler laws: everything measured, nothing changed, bytes as autograd has them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpart.compiler.capture import capture
from dpart.compiler.workload import Workload
from dpart.profiler.measure import profile
from dpart.profiler.profile import Profile
from dpart.runtime.errors import UserError
from dpart.runtime.files import read_file, write_file


def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(256, 8)
    )
    return Workload(model, args=(torch.randn(32, 64),), targets=(torch.randint(0, 8, (32,)),), loss=F.cross_entropy)


def test_every_layer_is_measured_and_the_model_is_left_alone(tmp_path) -> None:
    captured = capture(workload(), microbatch_size=8)
    before = {k: v.clone() for k, v in captured.model.state_dict().items()}
    seen = []
    found = profile(captured, repeats=3, progress=lambda done, total, name: seen.append((done, total, name)))
    assert [c.layer for c in found.costs] == [layer.name for layer in captured.graph.layers]
    assert all(c.forward_seconds > 0 and c.backward_seconds > 0 and c.repeats == 3 for c in found.costs)
    assert found.step_seconds > 0
    assert seen[-1][:2] == (len(found.costs), len(found.costs))
    assert all(torch.equal(v, before[k]) for k, v in captured.model.state_dict().items())
    assert all(p.grad is None for p in captured.model.parameters())
    write_file(found, tmp_path / "profile.json")
    assert read_file(Profile, tmp_path / "profile.json") == found


def test_bytes_are_those_of_the_tensors() -> None:
    found = profile(capture(workload(), microbatch_size=8), repeats=1)
    first = found.costs[0]
    assert first.parameter_bytes == first.trainable_bytes == 4 * (64 * 256 + 256)
    assert first.output_bytes == 4 * 8 * 256
    assert first.stash_bytes == 4 * 8 * 64  # A linear layer keeps its input.
    norm = found.costs[1]
    assert norm.parameter_bytes - norm.trainable_bytes == 4 * 2 * 256 + 8
    dropout = found.costs[3]
    assert dropout.stash_bytes >= 8 * 256


def test_a_frozen_prefix_costs_no_backward() -> None:
    given = workload()
    for parameter in given.model[0].parameters():
        parameter.requires_grad_(False)
    given.model[1].requires_grad_(False)
    found = profile(capture(given, microbatch_size=8), repeats=2)
    assert [c.backward_seconds > 0 for c in found.costs] == [False, False, False, False, True, True]
    assert found.costs[0].stash_bytes == 0


def test_no_repeats_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1, got 0"):
        profile(capture(workload()), repeats=0)
