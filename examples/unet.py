"""A U-Net that removes noise from scikit-learn's digits: its skips cross every stage in between.

    dpart profile   examples/unet.py:workload -o profile.json
    dpart partition profile.json -o plan.json
    dpart emit      examples/unet.py:workload plan.json -o build/unet
    torchrun --standalone --nproc-per-node 2 build/unet/train.py --steps 50 --lr 1e-3

Needs ``pip install scikit-learn``; the images come with it.
"""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dpart

ROWS, SIZE = 32, 32


class Double(nn.Sequential):
    """Two convolutions, each with its norm and activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """Down three levels and up again, each level joined to its partner by a skip."""

    def __init__(self, channels: tuple[int, ...] = (16, 32, 64), inputs: int = 1) -> None:
        super().__init__()
        widths = (inputs, *channels)
        self.down = nn.ModuleList([Double(a, b) for a, b in zip(widths, channels, strict=False)])
        self.pool = nn.MaxPool2d(2)
        self.bottom = Double(channels[-1], 2 * channels[-1])
        above = (2 * channels[-1], *channels[:0:-1])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in zip(above, channels[::-1], strict=True)])
        self.up = nn.ModuleList([Double(2 * c, c) for c in channels[::-1]])
        self.head = nn.Conv2d(channels[0], inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 1, height, width) to the same shape; height and width divide by 8."""
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], 1))
        return self.head(x)


def workload() -> dpart.Workload:
    """The net with random weights (always the same ones), and batches of noisy digits."""
    torch.manual_seed(0)
    noisy, clean = next(batches())
    return dpart.Workload(model=UNet(), args=(noisy,), targets=(clean,), loss=F.mse_loss, batches=batches, name="unet")


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """(noisy, clean) digits of SIZE x SIZE pixels, without end."""
    digits = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(digits, size=(SIZE, SIZE), mode="bilinear")
    generator = torch.Generator().manual_seed(0)
    while True:
        clean = images[torch.randint(len(images), (ROWS,), generator=generator)]
        yield clean + 0.3 * torch.randn(clean.shape, generator=generator), clean
