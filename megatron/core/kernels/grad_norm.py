"""Sum of squares of parts of a flat tensor, for norms over a model whose elements count once each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron.core.kernels.dispatch import compiled_for, tensor_argument
from megatron.core.kernels.extension import compiled_function
from megatron.core.kernels.float_halves import Halves, Numbers

Span = tuple[int, int]  # first and last + 1 element of a flat tensor

# Elements that are summed by themselves: enough work for a warp, few enough for all warps of a GPU to have some.
_TILE = 4096
# Rows of this many elements are summed in the tensor's dtype by plain torch, the sums of the rows in float64.
_ROW = 4096
# The exact sum of plain torch converts this many elements at a time, that of halves joins them.
_EXACT_BLOCK = 2**20


class ElementSpans:
    """Spans of elements of flat tensors of one length, cut for the kernel once and for all.

    Attributes:
        spans: first and last + 1 element of each.
        tiles: [t, 2] int64: the same of the tiles that the spans are cut into, where the tensors are.
    """

    def __init__(self, spans: Iterable[Span], device: torch.device) -> None:
        self.spans = tuple(spans)
        tiles = [(tile, min(tile + _TILE, stop)) for start, stop in self.spans for tile in range(start, stop, _TILE)]
        self.tiles = torch.tensor(tiles, dtype=torch.int64, device=device).view(-1, 2)


def sum_of_squares(flat: Numbers, spans: ElementSpans) -> Tensor:
    """Sum of the squares of the elements in `spans`, a float64 scalar on the device of `flat`.

    Finite exactly if all these elements are (in float64, if their squares are too). Deterministic: the bits depend on
    the elements and the spans alone, and with the compiled kernels not on the device either.

    Args:
        flat: [n] float64, float32 or bfloat16; or float32 in halves.
    """
    if isinstance(flat, Halves):
        return _of_halves(flat, spans)
    compiled = compiled_for("sum_of_squares", flat, reference_cost="some operations a span")
    if compiled is None:
        return sum_of_squares_reference(flat, spans)
    return sum_of_squares_compiled(compiled, flat, spans)


def _of_halves(flat: Halves, spans: ElementSpans) -> Tensor:
    """The same, with no more than a block of them joined at a time."""
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    whole_block = ElementSpans([(0, _EXACT_BLOCK)], flat.device)
    for first, last in spans.spans:
        for start in range(first, last, _EXACT_BLOCK):
            size = min(_EXACT_BLOCK, last - start)
            elements = whole_block if size == _EXACT_BLOCK else ElementSpans([(0, size)], flat.device)
            total += sum_of_squares(flat[start : start + size].joined(), elements)
    return total


def sum_of_squares_compiled(compiled: Callable[..., Any], flat: Tensor, spans: ElementSpans) -> Tensor:
    """The same by a kernel of `compiled_for`."""
    num_tiles = spans.tiles.shape[0]
    arguments = {"data": tensor_argument(flat), "tiles": spans.tiles.data_ptr(), "num_tiles": num_tiles}
    if not flat.is_cuda:
        return torch.tensor(compiled(**arguments), dtype=torch.float64)
    scratch_size = compiled_function("sum_of_squares_scratch", reference_cost="", device="cuda")
    assert scratch_size is not None
    scratch = torch.empty(scratch_size(num_tiles), dtype=torch.float64, device=flat.device)
    compiled(**arguments, scratch=scratch.data_ptr())
    return scratch[-1]


def sum_of_squares_reference(flat: Tensor, spans: ElementSpans) -> Tensor:
    """The same in plain torch, in other bits.

    Rows are summed in the dtype of `flat`, bfloat16 in float32, which may overflow above 1e17 or so although all
    elements are finite; then each square is taken in float64, slowly.
    """
    dtype = torch.promote_types(flat.dtype, torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start, stop in spans.spans:
        whole_rows = (stop - start) // _ROW * _ROW
        parts = []
        if whole_rows:
            rows = flat[start : start + whole_rows].view(-1, _ROW)
            parts.append(torch.linalg.vector_norm(rows, dim=1, dtype=dtype))
        if start + whole_rows < stop:
            parts.append(torch.linalg.vector_norm(flat[start + whole_rows : stop], dtype=dtype).view(1))
        for norms in parts:
            total += norms.double().square_().sum()
    return total if torch.isfinite(total) else _exact_sum_of_squares(flat, spans)


def _exact_sum_of_squares(flat: Tensor, spans: ElementSpans) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for start, stop in spans.spans:
        for block in torch.split(flat[start:stop], _EXACT_BLOCK):
            total += block.double().square_().sum()
    return total
