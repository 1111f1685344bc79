"""The twenty convolution layers of CNNOpt's table 2, on which kernel choices are evaluated."""

from __future__ import annotations

from types import MappingProxyType

LAYERS = MappingProxyType({
    "D1": (32, 3, 108, 3, 1), "D2": (32, 32, 108, 3, 1), "D3": (64, 32, 54, 3, 1), "D4": (64, 64, 54, 3, 1),
    "D5": (128, 64, 27, 3, 1), "D6": (128, 128, 27, 3, 1), "R1": (64, 3, 112, 7, 2), "R2": (64, 64, 56, 3, 1),
    "R4": (128, 64, 28, 3, 2), "R6": (128, 128, 28, 3, 1), "R7": (256, 128, 14, 3, 2), "R9": (256, 256, 14, 3, 1),
    "R10": (512, 256, 7, 3, 2), "R12": (512, 512, 7, 3, 1), "Y0": (32, 3, 544, 3, 1), "Y2": (64, 32, 272, 3, 1),
    "Y4": (128, 64, 136, 3, 1), "Y8": (256, 128, 68, 3, 1), "Y12": (512, 256, 34, 3, 1), "Y18": (1024, 512, 17, 3, 1),
})  # fmt: skip
"""Output channels, input channels, output width and height, filter, stride; batch 1, padding filter // 2. The sizes of strided layers are those of
the network (the paper's table 2 gives some by their input)."""

NETWORKS = MappingProxyType({"D": "DefoNet", "R": "ResNet-18", "Y": "Yolo-9000"})
"""Network of a layer by the first letter of its name."""


def layer(name: str) -> dict[str, int | str]:
    """The layer as a description for trials and tuning."""
    outputs, channels, size, filter_size, stride = LAYERS[name]
    return {
        "name": name, "outputs": outputs, "channels": channels, "height": size, "width": size, "filter": filter_size, "stride": stride,
    }  # fmt: skip
