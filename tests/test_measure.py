"""The part of a measured backward that computes gradients of parameters."""

import torch
from torch import nn

from dpart.compiler.capture import capture
from dpart.compiler.workload import Workload
from dpart.profiler.measure import profile


def costs(*modules: nn.Module, rows: int = 64, inputs: int = 256):
    x = torch.randn(rows, inputs)
    workload = Workload(nn.Sequential(*modules), args=(x,), loss=lambda y: y.square().mean())
    return profile(capture(workload, microbatch_size=rows), repeats=5).costs


def test_a_layer_whose_inputs_need_no_gradient_has_nothing_else_to_do() -> None:
    first, *_ = costs(nn.Linear(256, 512), nn.ReLU())
    assert first.weight_backward_seconds == first.backward_seconds > 0


def test_a_layer_without_parameters_or_with_frozen_ones_has_no_such_part() -> None:
    frozen = nn.Linear(512, 256).requires_grad_(False)
    _, relu, linear, loss = costs(nn.Linear(256, 512), nn.ReLU(inplace=True), frozen)
    assert relu.backward_seconds > 0
    assert relu.weight_backward_seconds == linear.weight_backward_seconds == loss.weight_backward_seconds == 0


def test_it_is_a_part_of_the_backward() -> None:
    made = costs(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.LayerNorm(512))
    assert all(0 <= cost.weight_backward_seconds <= cost.backward_seconds for cost in made)
    assert made[2].weight_backward_seconds > 0
