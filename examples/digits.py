"""A residual convolutional net with batch norms, trained on scikit-learn's handwritten digits.

    dpart profile   examples/digits.py:workload -o profile.json
    dpart partition profile.json -o plan.json
    dpart emit      examples/digits.py:workload plan.json -o build/digits
    torchrun --standalone --nproc-per-node 2 build/digits/train.py --steps 50 --lr 1e-3

Needs ``pip install scikit-learn``; the images come with it. A batch norm sees one microbatch at a time, so
its statistics depend on ``--microbatch-size``, never on the number of stages.
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dpart

ROWS = 64


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inputs, height, width) to (rows, outputs, height / stride, width / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Three pairs of blocks, each pair at half the resolution and twice the channels of the one before."""

    def __init__(self, channels: int = 32, classes: int = 10) -> None:
        super().__init__()
        c = channels
        self.conv = nn.Conv2d(1, c, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(c)
        self.blocks = nn.Sequential(
            Block(c, c),
            Block(c, c),
            Block(c, 2 * c, 2),
            Block(2 * c, 2 * c),
            Block(2 * c, 4 * c, 2),
            Block(4 * c, 4 * c),
        )
        self.head = nn.Linear(4 * c, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(rows, 1, 8, 8) to the classes' scores."""
        x = F.relu(self.bn(self.conv(images)))
        return self.head(self.blocks(x).mean((2, 3)))


def workload() -> dpart.Workload:
    """The net with random weights (always the same ones), and batches of digits."""
    torch.manual_seed(0)
    images, labels = next(batches())
    return dpart.Workload(
        model=ResNet(), args=(images,), targets=(labels,), loss=F.cross_entropy, batches=batches, name="resnet"
    )


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The 1,797 digits in random order, again and again; the last batch of each round is smaller."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    generator = torch.Generator().manual_seed(0)
    while True:
        for rows in torch.randperm(len(labels), generator=generator).split(ROWS):
            yield images[rows], labels[rows]
