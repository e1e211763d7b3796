"""Describes the tensors of a quantized weight, and reads parts of them.

A quantized weight consists of codes, which are small integers or floats, and of scales by which
their values are multiplied. The functions of this module read only the codes and scales of the
requested part of a weight. Thus each host dequantizes only its own shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from hfseq.checkpoints.weights import Index, Tensor
from hfseq.errors import WeightsError

#: A part of an array: one slice with explicit, non-negative bounds per axis.
Region = tuple[slice, ...]
#: A function that reads a region of an array.
ReadRegion = Callable[[Region], np.ndarray]

#: Maximum number of values that are dequantized at once.
PIECE = 1 << 20

#: The values of FP4 codes (E2M1): one sign bit, two exponent bits and one mantissa bit.
FP4_VALUES = np.array(
    [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32
)


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """The tensors that a checkpoint stores in place of a weight.

    Attributes:
        name: Name of the weight, such as ``model.layers.0.mlp.up_proj.weight``.
        prefix: The beginning that the names of all tensors of the weight have in common.
        tensors: The tensors. The keys are the names without the prefix.
        method: Name of the quantization method, for messages.
        location: Path of the weight file, for messages.
        dtype: The dtype of the dequantized weight.
    """

    name: str
    prefix: str
    tensors: Mapping[str, Tensor]
    method: str
    location: str
    dtype: str

    def error(self, problem: str) -> WeightsError:
        """Returns an error whose message contains the file and the name of the weight."""
        return WeightsError(f"{self.location}: cannot dequantize {self.name}: {problem}")

    def require(
        self,
        part: str,
        dtypes: tuple[str, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        source: str = "",
    ) -> Tensor:
        """Returns a tensor after checking its dtype and shape.

        Args:
            part: Name of the tensor without the prefix.
            dtypes: The allowed dtypes, or `None` for any dtype.
            shape: The expected shape, or `None` for any shape.
            source: The values that determine the expected shape, for the message.

        Raises:
            WeightsError: The tensor is missing, or its dtype or shape is wrong.
        """
        name = f"{self.prefix}{part}"
        if part not in self.tensors:
            raise self.error(
                f"the checkpoint does not contain {name}, which {self.method} requires"
            )
        tensor = self.tensors[part]
        if dtypes is not None and tensor.dtype not in dtypes:
            raise self.error(
                f"{name} has the dtype {tensor.dtype}, but {self.method} requires "
                f"{' or '.join(dtypes)}"
            )
        if shape is not None and tensor.shape != shape:
            raise self.error(
                f"{name} has the shape {tensor.shape} instead of {shape}"
                + (f", which follows from {source}" if source else "")
            )
        return tensor

    def refuse_plain_weight(self) -> None:
        """Raises `WeightsError` if the checkpoint also contains the weight itself."""
        if "weight" in self.tensors or "" in self.tensors:
            packed = next(
                f"{self.prefix}{part}" for part in self.tensors if part not in ("weight", "")
            )
            raise self.error(
                f"the checkpoint contains both {self.name} and {packed}. Remove one of them"
            )

    def dequantized(self, shape: tuple[int, ...], values: ReadRegion) -> Tensor:
        """Returns the weight, which is dequantized when it is read.

        Args:
            shape: The shape of the weight.
            values: A function that dequantizes a region of the weight to float32.
        """

        def fill(result: np.ndarray, region: Region) -> None:
            if not result.size:
                return
            if result.size <= PIECE or max(result.shape) == 1:
                # The products are computed in float32 and rounded once.
                result[...] = values(region)
                return
            axis = next(axis for axis, size in enumerate(result.shape) if size > 1)
            step = max(1, PIECE * result.shape[axis] // result.size)
            for start in range(0, result.shape[axis], step):
                stop = min(start + step, result.shape[axis])
                part = slice(region[axis].start + start, region[axis].start + stop)
                piece = result[(*[slice(None)] * axis, slice(start, stop))]
                fill(piece, (*region[:axis], part, *region[axis + 1 :]))

        def read(index: Index) -> np.ndarray:
            region = resolve(index, shape)
            sizes = [part.stop - part.start for part in region]
            result = np.empty(sizes, np.dtype(self.dtype))
            fill(result, region)
            return result

        return Tensor(shape, self.dtype, read)


def resolve(index: Index, shape: tuple[int, ...]) -> Region:
    """Returns the region that an index selects. The index must not have steps."""
    slices = () if index is ... else index
    padded = (*slices, *[slice(None)] * (len(shape) - len(slices)))
    bounds = [part.indices(size)[:2] for part, size in zip(padded, shape, strict=True)]
    return tuple(slice(start, max(start, stop)) for start, stop in bounds)


def ceil_divide(number: int, divisor: int) -> int:
    """Returns the quotient of two integers, rounded up."""
    return -(-number // divisor)


def read_region(tensor: Tensor, transposed: bool = False) -> ReadRegion:
    """Returns a function that reads regions of a tensor, or of its transpose."""
    if transposed:
        return lambda region: tensor.read(region[::-1]).T
    return tensor.read


def expand_blocks(read: ReadRegion, blocks: tuple[int, ...], region: Region) -> np.ndarray:
    """Reads values that exist once per block, such as scales, and repeats them within the blocks.

    Args:
        read: Reads a region of the array that contains one value per block.
        blocks: The size of a block along each axis of the weight.
        region: The region of the weight for which values are returned.

    Returns:
        A float32 array that broadcasts to the shape of the region.
    """
    spans = tuple(
        slice(part.start // block, ceil_divide(part.stop, block))
        for part, block in zip(region, blocks, strict=True)
    )
    values = read(spans)
    values = exponent_values(values) if values.dtype == np.uint8 else values.astype(np.float32)
    for axis, (part, block, span) in enumerate(zip(region, blocks, spans, strict=True)):
        if block > 1 and values.shape[axis] > 1:
            start = part.start - span.start * block
            repeated = np.repeat(values, block, axis)
            columns = slice(start, start + part.stop - part.start)
            values = repeated[(*[slice(None)] * axis, columns)]
    return values


def exponent_values(codes: np.ndarray) -> np.ndarray:
    """Returns the powers of two that E8M0 codes stand for: `2 ** (code - 127)`, and NaN for 255."""
    import ml_dtypes

    return np.ascontiguousarray(codes).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def unpack_bits(read: ReadRegion, bits: int, region: Region) -> np.ndarray:
    """Reads a region of a matrix of unsigned integers that is packed along its second axis.

    Args:
        read: Reads a region of the matrix of 32-bit words. Each row is one sequence of bits that
            starts with the lowest bit of the first word. An integer may extend over two words.
        bits: Bits per integer.
        region: The region of the matrix of integers.

    Returns:
        A uint8 array with the shape of the region.
    """
    rows, columns = region
    first = columns.start * bits // 32
    words = read((rows, slice(first, ceil_divide(columns.stop * bits, 32))))
    stored_bytes = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    start, count = columns.start * bits - 32 * first, columns.stop - columns.start
    if 8 % bits == 0:
        codes = split_bytes(stored_bytes, bits)
        return codes[:, start // bits :][:, :count]
    sequence = np.unpackbits(stored_bytes, axis=1, bitorder="little")
    sequence = sequence[:, start : start + count * bits].reshape(len(words), count, bits)
    return np.packbits(sequence, axis=2, bitorder="little")[..., 0]


def split_bytes(packed: np.ndarray, bits: int, high_first: bool = False) -> np.ndarray:
    """Splits the bytes on the last axis into codes of 1, 2, 4 or 8 bits.

    Args:
        packed: A uint8 array.
        bits: Bits per code.
        high_first: Whether the first code of a byte is in its high bits.
    """
    count = 8 // bits
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * count), np.uint8)
    for position in range(count):
        shift = bits * (count - 1 - position if high_first else position)
        codes[..., position::count] = (packed >> np.uint8(shift)) & np.uint8((1 << bits) - 1)
    return codes
