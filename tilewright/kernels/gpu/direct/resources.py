"""Resources of the blocks of direct convolutions: buffers in shared memory, what a thread fetches, and registers."""

from __future__ import annotations

import numpy as np

from tilewright.hardware.machine import Machine
from tilewright.kernels.columns import Columns
from tilewright.kernels.gpu.direct.patch_layout import fetch_vector_of, fetching_of, lines_read_of, patch_layout_of
from tilewright.kernels.gpu.direct.schedule import (
    REGISTERS,
    RS,
    SHARED,
    DirectFacts,
    DirectSchedule,
    columns_of,
    extents_of,
    patch_of,
    slice_of,
    steps_of,
    threads_of,
)
from tilewright.kernels.gpu.gemm.space import PLAIN


def buffer_elements_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Elements of one buffer of the patch, and of one buffer of the filters (0 if they are not staged)."""
    taps = facts.filter_y * facts.filter_x
    channels = candidates["channels"]
    filters: np.ndarray = np.where(candidates["filters"] == SHARED, channels * taps * extents_of(candidates)[0], 0)
    return patch_layout_of(facts, candidates).elements, filters


def fetches_of(facts: DirectFacts, candidates: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a thread fetches per step: elements of the patch, channels per load of these, and vectors of filters."""
    threads, channels = threads_of(candidates), candidates["channels"]
    lanes = fetch_vector_of(facts, candidates)
    patch_rows, patch_columns = patch_of(facts, candidates)
    _, at_once, lines = fetching_of(facts, candidates)
    elements = lanes * -(-patch_rows // lines) * -(-patch_columns // at_once)
    size_k = extents_of(candidates)[0]
    vectors = size_k // np.minimum(facts.filter_vector, size_k)
    filters = -(-channels * facts.filter_y * facts.filter_x * vectors // threads)
    return elements, lanes, np.where(candidates["filters"] == SHARED, filters, 0)


def registers_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Estimated 32-bit registers per thread: sums, slice, filters, data fetched through registers, and addresses. CNNOpt's equations 2 and 3 count
    sums, slice and one register for each filter element held, times the threads of a block. Fitted to the registers that ptxas 13.0 allocated for 144
    random candidates of twelve layers on sm_90a: four in five are within 25 %."""
    sums = candidates["register_k"] * candidates["register_y"] * candidates["register_x"]
    slice_rows, slice_columns = slice_of(facts, candidates)
    held = np.where(candidates["slice"] == RS, slice_rows, 1) * slice_columns
    further = held * (lines_read_of(facts, candidates)[2] - 1)  # of vectors of channels all elements are live
    taps = facts.filter_y * facts.filter_x
    filters = np.where(candidates["slice"] == RS, 1, facts.filter_x) * candidates["register_k"]
    filters = np.where(candidates["filters"] == REGISTERS, 2 * taps * candidates["register_k"], filters)
    elements, lanes, vectors = fetches_of(facts, candidates)
    fetched = np.where(candidates["stages"] == 1, elements + 4 * vectors, (elements // lanes + vectors) // 2)
    addresses = 28 + np.where(candidates["filters"] == SHARED, 0, 12)
    used = (115 * sums + 60 * held + 110 * filters) // 100 + fetched
    if "loop" in candidates:  # nothing is held for the next step while slices and filters are
        alone = 115 * sums // 100 + np.maximum((60 * held + 110 * filters) // 100, fetched)
        used = np.where(candidates["loop"] == PLAIN, alone, used)
    registers: np.ndarray = np.minimum(used + further + addresses, 10_000)
    return registers


def blocks_to_ask_for(schedule: DirectSchedule, facts: DirectFacts, machine: Machine) -> int:
    """The occupancy to request from the assembler, which caps a thread's registers at 1.2 times the estimate. Without a cap the assembler reads
    filters and slices too far ahead."""
    estimate = int(registers_of(facts, columns_of(schedule))[0])
    return max(1, machine.registers_per_processor // (schedule.threads * (estimate * 6 // 5)))


def shared_bytes_of(facts: DirectFacts, candidates: Columns) -> np.ndarray:
    """Bytes of shared memory per block: buffers of the patch and of the filters, and, in a cluster, the block's sums.

    For 64 outputs, 8 x 16 pixels, 3 x 3 taps and 4 channels with three stages, the patch is 10 x 18, with a row pitch of 20 and 200 per channel:
    3 * 4 * (4 * 200 + 4 * 9 * 64) = 37248."""
    buffers = np.minimum(np.maximum(candidates["stages"], 2), steps_of(facts, candidates))
    if "loop" in candidates:
        buffers = np.where(candidates["loop"] == PLAIN, 1, buffers)
    k, y, x = extents_of(candidates)
    needed: np.ndarray = facts.element_bytes * (buffers * sum(buffer_elements_of(facts, candidates)) + candidates["cluster"] * k * y * x)
    return needed
