"""The program of `make demo`: handwritten digits from training to generated kernels, and ResNet-18 against PyTorch.

python examples/demo.py [--seconds 5] [--target native]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tilewright
from tilewright.runtime.executable import Executable
from tilewright.runtime.plan_text import plan_text
from tilewright.tuning.measure import interleaved_seconds
from tilewright.tuning.peers import eager_channels_last

BATCH = 64
LEAST_EPOCHS = 12  # even if time is short: comparing an untrained network is of little interest


class DigitNet(nn.Module):
    """A small LeNet for 8x8 images: two convolutions with pooling, then two linear layers. (N, 1, 8, 8) to (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(128, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images))
        return scores


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits, shuffled: training images and labels, and held-out ones (a quarter)."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    held_out = len(images) // 4
    return images[held_out:], labels[held_out:], images[:held_out], labels[:held_out]


def train(module: nn.Module, images: Tensor, labels: Tensor, seconds: float, console: Console) -> None:
    """Trains with Adam on shuffled batches for the given time, at least LEAST_EPOCHS epochs."""
    optimiser = torch.optim.Adam(module.parameters(), 2e-3)
    columns = (SpinnerColumn(), TextColumn("training: {task.description}"), TimeElapsedColumn())
    start, epoch = time.perf_counter(), 0
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        while epoch < LEAST_EPOCHS or time.perf_counter() - start < seconds:
            epoch += 1
            for batch in torch.randperm(len(images)).split(BATCH):
                loss = nn.functional.cross_entropy(module(images[batch]), labels[batch])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            progress.update(task, description=f"epoch {epoch}, loss {loss.item():.4f}")
    console.print(f"trained on {len(images)} images: {epoch} epochs, last loss {loss.item():.4f}")


def compiled(module: nn.Module, inputs: tuple[Tensor, ...], target: str, name: str, console: Console) -> Executable:
    start = time.perf_counter()
    with console.status(f"compiling {name} for {target}"):
        executable = tilewright.compile(module, inputs, target=target)
    console.print(f"compiled {name} in {time.perf_counter() - start:.1f} s")
    return executable


def classify_digits(seconds: float, target: str, console: Console) -> None:
    """Trains, compiles, and classifies the held-out images with PyTorch and with the compiled program."""
    images, labels, test_images, test_labels = digits(seed=0)
    module = DigitNet()
    train(module, images, labels, seconds, console)
    module.eval()
    batches = [batch for batch in test_images.split(BATCH) if len(batch) == BATCH]
    expected = test_labels[: len(batches) * BATCH]
    executable = compiled(module, (batches[0],), target, "DigitNet", console)
    eager = torch.inference_mode()(module)
    theirs = torch.cat([eager(batch) for batch in batches])
    ours = torch.cat([executable(batch) for batch in batches])
    seconds_of = interleaved_seconds({"PyTorch": lambda: eager(batches[0]), "Tilewright": lambda: executable(batches[0])}, 8, 0.1)
    table = Table(title=f"{len(expected)} held-out digits, batch {BATCH}")
    for heading in ("program", "correct", "milliseconds a batch"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    for name, scores in (("PyTorch", theirs), ("Tilewright", ours)):
        correct = (scores.argmax(1) == expected).float().mean().item()
        table.add_row(name, f"{correct:.2%}", f"{statistics.median(seconds_of[name]) * 1e3:.3f}")
    console.print(table)
    agreement = (theirs.argmax(1) == ours.argmax(1)).float().mean().item()
    with torch.inference_mode():
        exact = copy.deepcopy(module).double()(torch.cat(batches).double())
    errors = [((scores - exact).abs().max() / exact.abs().max()).item() for scores in (theirs, ours)]
    console.print(f"the two agree on {agreement:.2%} of the images")
    console.print(f"largest error against float64, relative to the largest score: PyTorch {errors[0]:.1e}, Tilewright {errors[1]:.1e}\n")


def compare_resnet(target: str, console: Console) -> None:
    """ResNet-18 with random weights: its plan, and its time against PyTorch with channels-last tensors."""
    module, inputs = tilewright.zoo.build("resnet18")
    executable = compiled(module, inputs, target, "ResNet-18", console)
    console.print(plan_text(executable.plan, f"ResNet-18 for {executable.image.machine.name}"), soft_wrap=True)
    eager = eager_channels_last(module, inputs)
    with console.status("measuring in turns"):
        seconds_of = interleaved_seconds({"PyTorch eager, channels last": lambda: eager(*inputs), "Tilewright": lambda: executable(*inputs)}, 10, 0.5)
    table = Table(title=f"ResNet-18, one image of 224 x 224, {torch.get_num_threads()} threads")
    for heading in ("program", "median ms", "least ms", "calls"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    for name, times in seconds_of.items():
        table.add_row(name, f"{statistics.median(times) * 1e3:.2f}", f"{min(times) * 1e3:.2f}", str(len(times)))
    console.print(table)
    verification = executable.verify(*inputs)
    worst = verification.worst[0]
    verdict = "all within tolerance" if verification.passed else "WRONG"
    console.print(f"{len(verification.values)} stored values against float64: {verdict}; largest relative error {worst.relative_error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="time of training")
    parser.add_argument("--target", default="native", help="a target that is present (default: this CPU)")
    options = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file or a pipe: tables need not wrap
    torch.manual_seed(0)
    classify_digits(options.seconds, options.target, console)
    compare_resnet(options.target, console)


if __name__ == "__main__":
    main()
