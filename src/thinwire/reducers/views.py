"""Flat views of tensors of any strides."""

from __future__ import annotations

from torch import Tensor


def memory_view(tensor: Tensor) -> Tensor:
    """A 1-d view of a dense tensor in the order in which it lies in memory; of any other tensor all of it.

    Like `Staged` it knows nothing of autograd: parameters can be averaged as they are.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    permuted = _outermost_first(tensor)
    return permuted.view(-1) if permuted.is_contiguous() else tensor


def with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient as it lies in DDP's bucket, seen in logical order.

    DDP copies the gradient of a channels-last weight into its bucket in the weight's memory order, and hands it
    to hooks as if it were contiguous. (Where a parameter has gaps or overlaps it is.)
    """
    dense = parameter.is_contiguous() or _outermost_first(parameter).is_contiguous()
    return gradient.as_strided(parameter.shape, parameter.stride()) if dense else gradient


def _outermost_first(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions in the order of their strides: contiguous if it is dense."""
    return tensor.permute(
        sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    )


class Staged:
    """A 1-d, logically ordered stand-in for a tensor: a view of it where there is one, else a copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._is_view = tensor.is_contiguous()
        self.flat = self._tensor.view(-1) if self._is_view else self._tensor.reshape(-1)

    def write_back(self) -> None:
        """Bring what was written into `flat` into the tensor."""
        if not self._is_view:
            self._tensor.copy_(self.flat.view(self._tensor.shape))
