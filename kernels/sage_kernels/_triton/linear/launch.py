"""Launch the kernels of 8-bit linear layers on the tensors' device and current stream.

The ops have checked all arguments.
"""

import torch

from ...facts.numerics import CODE_TYPES
from ...facts.recipe import GATED
from .. import compat
from ..launch import buffer, capability_of, launch, processors_of
from .matmul import STRIP, _add_parts_kernel, _linear_kernel
from .quantize_rows import _quantize_rows_kernel
from .tiles import (
    POINTERS,
    FewRowsTile,
    LinearTile,
    choose_linear_tile,
    choose_weight_only_tile,
    split_last_tiles,
)
from .weight_only import _weight_only_kernel, prefetch_instruction


ALIGNMENT = 16  # bytes between rows of codes are a multiple of this: the copy engine needs it
_GROUP = 8  # rows of tiles that programs walk together, see `tile_of`


def _aligned(number: int) -> int:
    return -(-number // ALIGNMENT) * ALIGNMENT


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape x [..., K] to [rows, K] with a last stride of 1; a view if the strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _broadcast(x: torch.Tensor, shape) -> tuple[torch.Tensor, int, int, int]:
    """Expand x to `shape` [..., K] without a copy if possible.

    Returns: the tensor, the number of tokens of a sample, its stride from sample to sample, and from token to token.
    """
    x = x.expand(shape)
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    if len(shape) <= 2:
        return x, shape[0] if len(shape) == 2 else 1, 0, x.stride(0) if len(shape) == 2 else 0
    if len(shape) == 4:
        x = x.flatten(1, 2) if x.stride(1) == x.stride(2) * shape[2] else x.contiguous().flatten(1, 2)
    # the stride of a size of 1 is arbitrary; with 0 the caller sees that one vector serves all rows
    return x, x.shape[1], *(step if size > 1 else 0 for step, size in zip(x.stride()[:2], x.shape, strict=False))


def quantize_shape(columns: int) -> tuple[int, int, int, int, int]:
    """Choose how `_quantize_rows_kernel` divides rows of so many columns.

    Returns: bytes from one row of codes to the next, width of a piece, pieces of a row, rows of a program, warps.
    """
    stride = _aligned(columns)
    # seven pieces were timed only for rows so long that each thread reads 16 bytes of each piece
    numbers = (1, 3, 5, 7) if stride >= 7 * 1024 else (1, 3, 5)
    widths = {pieces: max(16, _power_of_two(-(-stride // pieces))) for pieces in numbers}
    pieces = min(widths, key=lambda n: n * widths[n])
    total = pieces * widths[pieces]
    warps = 1 << (min(16, max(4, total // 1024)).bit_length() - 1)
    return stride, widths[pieces], pieces, max(1, 4096 // _power_of_two(total)), warps


def _power_of_two(number: int) -> int:
    """Return the smallest power of two >= number."""
    return 1 << (number - 1).bit_length()


def launch_dynamic_linear(of_rows: tuple, of_product: tuple):
    """Launch `sage_kernels.dynamic_linear`.

    of_rows: arguments of `launch_quantize_activation`. of_product: those of `launch_quantized_linear` behind the rows.
    """
    return launch_quantized_linear(*launch_quantize_activation(*of_rows, returned=False), *of_product)


def launch_quantize_activation(
    x, format, norm, weight, bias, eps, gain, shift, balance, beside, *, returned: bool = True
):
    """Launch `sage_kernels.quantize_activation`. Rows of codes are a multiple of ALIGNMENT bytes apart.

    returned: True if the codes are the result of the op; False if only a later launch of the same op reads them.
    """
    flat = _as_rows(x)
    other = flat if beside is None else _as_rows(beside)
    columns = x.shape[-1] + (0 if beside is None else beside.shape[-1])
    shape = torch.Size((*x.shape[:-1], columns))
    number = flat.shape[0]
    stride, width, pieces, rows, warps = quantize_shape(columns)
    codes = buffer(*x.shape[:-1], stride, dtype=CODE_TYPES[format], device=x.device, returned=returned)
    scale = buffer(*x.shape[:-1], device=x.device, returned=returned)
    none = scale  # stands for pointers that are never read
    tokens, strides, given = 1, [], []
    for tensor in (gain, shift):
        if tensor is None:
            given, strides = [*given, none], [*strides, 0, 0]
        else:
            tensor, tokens, *steps = _broadcast(tensor, shape)
            given, strides = [*given, tensor], [*strides, *steps]
    with torch.cuda.device_of(x):
        launch(
            _quantize_rows_kernel, -(-number // rows),
            flat, other, codes, scale, *(none if t is None else t.contiguous() for t in (weight, bias)), *given,
            none if balance is None else balance.contiguous(),
            number, columns, x.shape[-1], tokens, eps, flat.stride(0), other.stride(0), stride, *strides,
            WIDTH=width, PIECES=pieces, ROWS=rows, NORM=norm, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            HAS_GAIN=gain is not None, HAS_SHIFT=shift is not None, HAS_BALANCE=balance is not None,
            HAS_BESIDE=beside is not None, FP8=format == "fp8", OVERLAP=_overlaps(x.device), num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes if stride == columns else codes[..., :columns], scale


def launch_quantized_linear(
    codes, scale, weight, weight_scale, bias, activation, gate, residual, dtype, *, tile: LinearTile | None = None
):
    """Launch `sage_kernels.quantized_linear`. tile: overrides the table (benchmarks, tests)."""
    shape, columns = codes.shape[:-1], weight.shape[0]
    columns_out = columns // 2 if activation in GATED else columns
    x, w = _as_rows(codes), _as_rows(weight)
    rows, depth = x.shape
    tile = tile or _device_tile(x.device, rows, columns)
    out = buffer(*shape, columns_out, dtype=dtype, device=x.device, returned=True)
    vectors, tokens, gate_strides, constants = _finish_options(
        out, weight_scale.contiguous(), bias, activation=activation, gate=gate, residual=residual
    )
    vectors = [scale.reshape(-1).contiguous(), *vectors]
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP": _GROUP, "FP8": codes.dtype != torch.int8}
    tiles = -(-rows // tile.block_m) * -(-columns // tile.block_n)
    sizes = [rows, columns, columns_out, depth, tokens]
    flat = out.view(-1, columns_out)
    residual = flat if residual is None else _as_rows(residual)
    with torch.cuda.device_of(x):
        if tile.kernel == "hopper" and all(_copyable(t) for t in (x, w, flat, residual)):
            _launch_hopper(tile, tiles, x, w, flat, residual, vectors, sizes, gate_strides, constants)
            return out
        if tile.kernel == "hopper":
            tile = POINTERS
            constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
            tiles = -(-rows // tile.block_m) * -(-columns // tile.block_n)
        launch(
            _linear_kernel, tiles, x, w, out, residual, *vectors, *sizes,
            x.stride(0), w.stride(0), *gate_strides, residual.stride(0),
            BLOCK_K=tile.block_k, STAGES=tile.num_stages, ASM=x.is_cuda and torch.version.hip is None, **constants,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _launch_hopper(tile: LinearTile, tiles: int, x, w, out, residual, vectors, sizes, gate_strides, constants):
    """Launch the kernel of hopper/, and `_add_parts_kernel` if the last tiles are shared.

    Its programs compute several tiles each. Operands must be `_copyable`.
    """
    from ..hopper_primitives import describe
    from .hopper.kernel import linear_hopper_kernel
    from .hopper.types import PART

    processors = processors_of(x.device)
    whole, parts = split_last_tiles(tile, tiles, processors, sizes[3])
    shared = tiles - whole
    half, sums = tile.block_m // 2, vectors[0]  # sums: a stand-in, never read nor written if all tiles are whole
    if shared:
        dtype = torch.float32 if constants["FP8"] else torch.int32
        sums = buffer(shared, parts, tile.block_m, tile.block_n, dtype=dtype, device=x.device)
    programs = min(whole + shared * parts, processors)
    launch(
        linear_hopper_kernel, programs, describe(x, [half, tile.block_k]), describe(w, [tile.block_n, tile.block_k]),
        describe(out, [half, PART.value]), describe(residual, [half, tile.block_k // residual.element_size()]),
        sums, *vectors, *sizes, programs, whole, parts, *gate_strides,
        SLOTS=tile.num_stages, BUFFERS=4 // out.element_size(), SPLIT=shared > 0, **constants,
        num_warps=tile.num_warps, launch_pdl=True, enable_fp_fusion=True,
    )  # fmt: skip
    if shared:
        launch_add_parts(sums, whole, out, residual, vectors, sizes, gate_strides, constants)


def launch_add_parts(sums, whole: int, out, residual, vectors, sizes, gate_strides, constants, **others):
    """Launch the kernel that adds the parts of shared tiles and finishes them.

    sums: [tiles, parts, block_m, block_n], of the tiles from number `whole` on. others: more constants.
    """
    rows, columns, columns_out, _, tokens = sizes
    tiles, parts, block_m, _ = sums.shape
    options = {"HAS_X_SCALE": True, "SCALE_STEP": 1} | constants | others
    options.pop("FP8", None)
    capability = capability_of(sums.device)
    overlap = capability >= 90 and compat.PROGRAMMATIC
    strip = min(STRIP, block_m)
    launch(
        _add_parts_kernel, tiles * (block_m // strip), sums, out, residual, *vectors,
        rows, columns, columns_out, tokens, whole, parts, *gate_strides, residual.stride(0),
        STRIP=strip, ASM=capability > 0, OVERLAP=overlap, **options,
        **({"launch_pdl": True} if overlap else {}), enable_fp_fusion=True,
    )  # fmt: skip


def launch_weight_only_linear(
    x, weight, weight_scale, bias, activation="none", gate=None, residual=None, dtype=None, batch_invariant=False, *,
    tile: FewRowsTile | None = None,
):  # fmt: skip
    """Launch `sage_kernels.weight_only_linear`. tile: overrides the table (benchmarks, tests)."""
    shape, columns = x.shape[:-1], weight.shape[0]
    columns_out = columns // 2 if activation in GATED else columns
    flat, w = _as_rows(x), _as_rows(weight)
    rows, depth = flat.shape
    capability = capability_of(x.device)
    # the interpreter has no bf16 matmul
    in_fp32 = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and not (x.is_cuda or capability))
    tile = tile or choose_weight_only_tile(capability, rows, columns, fp32=in_fp32, batch_invariant=batch_invariant)
    out = buffer(*shape, columns_out, dtype=dtype or x.dtype, device=x.device, returned=True)
    if weight_scale.stride(0) != 2:  # that of rows of value and gate in turns: no copy
        weight_scale = weight_scale.contiguous()
    vectors, tokens, gate_strides, options = _finish_options(
        out, weight_scale, bias, activation=activation, gate=gate, residual=residual
    )
    sizes = [rows, columns, columns_out, depth, tokens]
    flat_out = out.view(-1, columns_out)
    residual = flat_out if residual is None else _as_rows(residual)
    tiles = -(-rows // tile.block_m) * -(-columns // tile.block_n)
    overlap = capability >= 90 and compat.PROGRAMMATIC
    is_aligned = w.data_ptr() % 16 == w.stride(0) % 16 == depth % 16 == 0
    prefetch = tile.prefetch if overlap and is_aligned and depth // tile.parts >= tile.prefetch else 0
    sums = vectors[0]  # a stand-in, never read nor written if programs share no tile
    steps = -(-depth // (tile.lanes * tile.block_k))
    parts = -(-steps // -(-steps // tile.parts))  # each has work
    if parts > 1:
        sums = buffer(tiles, parts, tile.block_m, tile.block_n, device=x.device)
    options |= {"SCALE_STEP": vectors[0].stride(0) if columns > 1 else 1}
    options |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP": _GROUP}
    with torch.cuda.device_of(x):
        launch(
            _weight_only_kernel, tiles * parts, flat, w, flat_out, residual, sums, *vectors, *sizes,
            flat.stride(0), w.stride(0), *gate_strides, residual.stride(0),
            BLOCK_K=tile.block_k, LANES=tile.lanes, PARTS=parts, STAGES=tile.num_stages, FP32=in_fp32,
            ASM=capability > 0, OVERLAP=overlap, PREFETCH=prefetch,
            PREFETCH_ASM=prefetch_instruction(prefetch), **options, num_warps=tile.num_warps,
            num_stages=tile.num_stages, **({"launch_pdl": True} if overlap else {}), enable_fp_fusion=True,
        )  # fmt: skip
        if parts > 1:
            vectors = [vectors[0], *vectors]  # the first stands for a scale of each row, which these have not
            launch_add_parts(sums, 0, flat_out, residual, vectors, sizes, gate_strides, options, HAS_X_SCALE=False)
    return out


def _finish_options(out, weight_scale, bias, *, activation, gate, residual):
    """Prepare what follows a product with a weight.

    Returns: scale, bias and gate as the kernels read them, the number of tokens of a sample, the gate's strides, and
    the kernels' constants.
    """
    kind, gate_strides, tokens = "none", (0, 0), 1
    if gate is not None:
        gate, tokens, *gate_strides = _broadcast(gate, out.shape)
        kind = "row" if any(gate_strides) else "all"
    none = weight_scale
    vectors = [weight_scale, none if bias is None else bias.contiguous(), none if gate is None else gate]
    constants = {"ACTIVATION": GATED.get(activation, activation), "GATED": activation in GATED}
    constants |= {"HAS_BIAS": bias is not None, "GATE": kind, "HAS_RESIDUAL": residual is not None}
    return vectors, tokens, gate_strides, constants


def _copyable(x: torch.Tensor) -> bool:
    """Return whether the copy engine can access rows [R, K]: 16-byte aligned and not overlapping."""
    is_aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0
    return is_aligned and x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _overlaps(device: torch.device) -> bool:
    """Return whether the next matmul may start before the quantisation ends.

    Only the kernel of hopper/ waits by itself for the launch before it.
    """
    return capability_of(device) == 90 and compat.PROGRAMMATIC and compat.has_gluon()


def _device_tile(device: torch.device, rows: int, columns: int) -> LinearTile:
    tile = choose_linear_tile(capability_of(device), rows, columns)
    return POINTERS if tile.kernel == "hopper" and not compat.has_gluon() else tile
