"""The models that every feature is tried on: a GPT-2, a ResNet with BatchNorm, a U-Net with skips."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpart.compiler.workload import Workload


def gpt2() -> Workload:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 64, (6, 16))
    return Workload(
        transformers.GPT2LMHeadModel(config),
        args=(ids,),
        targets=(ids.clone(),),
        loss=lambda out, y: F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    )


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


def resnet() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(Residual(4, 4), Residual(4, 8, 2)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip
    return Workload(model, args=(torch.randn(6, 1, 8, 8),), targets=(torch.randint(0, 3, (6,)),), loss=F.cross_entropy)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.conv(1, 4), self.conv(4, 8)])
        self.pool = nn.MaxPool2d(2)
        self.middle = self.conv(8, 8)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")])
        self.up = nn.ModuleList([self.conv(16, 4), self.conv(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    @staticmethod
    def conv(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = self.pool(x)
        x = self.middle(x)
        for grow, block, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = block(torch.cat([grow(x), skip], 1))
        return self.head(x)


def unet() -> Workload:
    torch.manual_seed(0)
    x = torch.randn(6, 1, 8, 8)
    return Workload(UNet(), args=(x,), targets=(x.clone(),), loss=F.mse_loss)
