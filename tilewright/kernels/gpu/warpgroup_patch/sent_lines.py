"""Results of a block's tile that the copy engine stores, each line of the tile by itself: between the lines are pixels that are not stored."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.codegen.intrinsics.wgmma import M
from tilewright.ir.expr import Expr
from tilewright.ir.region import Unsuitable
from tilewright.ir.tensor_map import TensorMap
from tilewright.kernels.gpu.gemm.block_result import BlockResult
from tilewright.kernels.gpu.warpgroup.result_matrix import ELEMENT_BYTES
from tilewright.kernels.gpu.warpgroup.sent import Boxes, required_matrix
from tilewright.kernels.gpu.warpgroup_patch.form import PatchForm
from tilewright.kernels.gpu.warpgroup_patch.pixels import line_rows
from tilewright.kernels.gpu.warpgroup_patch.space import PatchSchedule


def sent_lines(form: PatchForm, schedule: PatchSchedule) -> TensorMap:
    """The map of the result, whose boxes are lines of a tile by the channels of a warpgroup, rows of 128 bytes: so that each may begin at any pixel.

    Raises:
        Unsuitable: if the copy engine cannot store the result, or it is that of several products.
    """
    if form.product.batch:
        raise Unsuitable("lines of a tile are those of one product")
    return required_matrix(form.product).lines(form.facts.outputs, schedule.width, M * ELEMENT_BYTES)


def line_boxes(form: PatchForm, schedule: PatchSchedule, result: BlockResult, image: Expr, first: Sequence[Expr], group: Expr) -> Boxes:
    """The lines of the tile of an image that begins at the positions `first`."""
    described, channel = sent_lines(form, schedule), result.first_n + group * M
    *outer, last = first

    def at(number: Expr, _: Expr) -> Sequence[Expr]:
        begin = [*outer[:-1], *(line + number for line in outer[-1:]), last]
        return channel, *reversed(begin), image

    lines = schedule.height if outer else 1
    return Boxes(described, lines, line_rows(form.facts, schedule) * M, at)
