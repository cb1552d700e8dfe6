"""The mixing kernels, one a direction. `moa.kernels.triton_mix` launches them.

A row is a token. A program is one warp and owns one row: it holds the row's gates as scalars, walks over the D channels
tile by tile, and in the backward sums the gates' gradients, which are sums over D, in registers. So the backward reads
y, z and grad_h once, computes the activations anew, and no two programs write to the same place: results are
reproducible. All arithmetic is float32, whatever the tensors are.

Arithmetic limits these kernels more than memory does: an H200 can issue some 60 instructions for each channel in the
time that it takes to move a channel's y, z, grad_h, grad_y and grad_z in bfloat16, and the backward needs 40 to 110.
"""

import triton
import triton.language as tl

from moa.kernels.triton_activations import activation, derivative, derivatives, share, values


@triton.jit
def forward_kernel(
    y, y_row, y_channel, z, z_row, z_channel, pi, pi_row, pi_column, rho, rho_row, rho_column, h,
    D: tl.constexpr, FORM: tl.constexpr, NAMES: tl.constexpr, BASIS: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, HARDWARE: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # times a stride it may pass 2^31
    pi_k = _load_gates(pi + row * pi_row, pi_column, FORM, NAMES, BASIS)
    if FORM == "bi_sided":
        rho_k = _load_gates(rho + row * rho_row, rho_column, FORM, NAMES, BASIS)
    for start in range(0, D, STEPS * LANES * VECTOR):
        channels = _tile(start, STEPS, LANES, VECTOR)
        y_tile = _load(y, row, y_row, y_channel, channels, D, VECTOR)
        if FORM == "type_one":
            h_tile = _mix(pi_k, values(y_tile, BASIS, HARDWARE, COARSE))
        else:
            z_tile = _load(z, row, z_row, z_channel, channels, D, VECTOR)
            sigma_z = values(z_tile, BASIS, HARDWARE, COARSE)
            if FORM == "one_sided":
                h_tile = activation(y_tile, "silu", HARDWARE, COARSE) * _mix(pi_k, sigma_z)
            elif FORM == "bi_sided":
                h_tile = _mix(rho_k, values(y_tile, BASIS, HARDWARE, COARSE)) * _mix(pi_k, sigma_z)
            else:
                tl.static_assert(FORM == "quadratic")
                h_tile = _mix(_partners_of_y(pi_k, sigma_z), values(y_tile, BASIS, HARDWARE, COARSE))
        _store(h, row, channels, h_tile, D, VECTOR)


@triton.jit
def backward_kernel(
    grad_h, grad_h_row, grad_h_channel, y, y_row, y_channel, z, z_row, z_channel,
    pi, pi_row, pi_column, rho, rho_row, rho_column, grad_y, grad_z, grad_pi, grad_rho,
    D: tl.constexpr, FORM: tl.constexpr, NAMES: tl.constexpr, BASIS: tl.constexpr, STEPS: tl.constexpr,
    LANES: tl.constexpr, VECTOR: tl.constexpr, HARDWARE: tl.constexpr, COARSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pi_k = _load_gates(pi + row * pi_row, pi_column, FORM, NAMES, BASIS)
    pi_sums = _zeros(len(pi_k), LANES)
    if FORM == "bi_sided":
        rho_k = _load_gates(rho + row * rho_row, rho_column, FORM, NAMES, BASIS)
        rho_sums = _zeros(len(rho_k), LANES)
    for start in range(0, D, STEPS * LANES * VECTOR):
        channels = _tile(start, STEPS, LANES, VECTOR)
        g = _load(grad_h, row, grad_h_row, grad_h_channel, channels, D, VECTOR)
        y_tile = _load(y, row, y_row, y_channel, channels, D, VECTOR)
        if FORM == "type_one":
            g_y = g * _mix(pi_k, derivatives(y_tile, BASIS, HARDWARE, COARSE))
            pi_sums = _add_products(pi_sums, g, values(y_tile, BASIS, HARDWARE, COARSE))
        else:
            z_tile = _load(z, row, z_row, z_channel, channels, D, VECTOR)
            sigma_z = values(z_tile, BASIS, HARDWARE, COARSE)
            slope_z = derivatives(z_tile, BASIS, HARDWARE, COARSE)
            if FORM == "quadratic":
                sigma_y = values(y_tile, BASIS, HARDWARE, COARSE)
                slope_y = derivatives(y_tile, BASIS, HARDWARE, COARSE)
                g_y = g * _mix(_partners_of_y(pi_k, sigma_z), slope_y)
                g_z = g * _mix(_partners_of_z(pi_k, sigma_y), slope_z)
                pi_sums = _add_pairs(pi_sums, g, sigma_y, sigma_z)
            else:
                g_right = g * _mix(pi_k, sigma_z)
                if FORM == "one_sided":
                    left = activation(y_tile, "silu", HARDWARE, COARSE)
                    left_slope = derivative(y_tile, "silu", HARDWARE, COARSE)
                else:
                    tl.static_assert(FORM == "bi_sided")
                    sigma_y = values(y_tile, BASIS, HARDWARE, COARSE)
                    left = _mix(rho_k, sigma_y)
                    left_slope = _mix(rho_k, derivatives(y_tile, BASIS, HARDWARE, COARSE))
                    rho_sums = _add_products(rho_sums, g_right, sigma_y)
                g_left = g * left
                g_y = g_right * left_slope
                g_z = g_left * _mix(pi_k, slope_z)
                pi_sums = _add_products(pi_sums, g_left, sigma_z)
            _store(grad_z, row, channels, g_z, D, VECTOR)
        _store(grad_y, row, channels, g_y, D, VECTOR)
    _store_gate_gradients(grad_pi, row, pi_sums, FORM, NAMES, BASIS)
    if FORM == "bi_sided":
        _store_gate_gradients(grad_rho, row, rho_sums, FORM, NAMES, BASIS)


@triton.jit
def _tile(start, STEPS: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """The channels from `start` on as a tile (STEPS, LANES, VECTOR), in memory order, a vector being one lane's."""
    steps = tl.arange(0, STEPS)[:, None, None] * (LANES * VECTOR)
    lanes = tl.arange(0, LANES)[None, :, None] * VECTOR
    channels = start + steps + lanes + tl.arange(0, VECTOR)[None, None, :]
    # Triton would give a lane longer vectors where it sees that it can. This hint, and those on alignment below, take
    # the place of what it sees: each lane has all steps and one vector of every tensor, and sums over these stay in it.
    return tl.max_contiguous(channels, (1, 1, VECTOR))


@triton.jit
def _load(pointer, row, row_stride, channel_stride, channels, D: tl.constexpr, VECTOR: tl.constexpr):
    place = pointer + tl.multiple_of(row * row_stride, VECTOR) + channels * channel_stride
    return tl.load(place, mask=channels < D, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, row, channels, tile, D: tl.constexpr, VECTOR: tl.constexpr):
    place = pointer + tl.multiple_of(row * D, VECTOR) + channels
    tl.store(place, tile.to(pointer.dtype.element_ty), mask=channels < D)


@triton.jit
def _load_gates(pointer, stride, FORM: tl.constexpr, NAMES: tl.constexpr, BASIS: tl.constexpr):
    """A row's gates as a tuple of scalars: one for each function of BASIS, for "quadratic" one for each pair."""
    M: tl.constexpr = len(NAMES)
    gates = ()
    for k in tl.static_range(M * (M + 1) // 2 if FORM == "quadratic" else M):
        gates = gates + (tl.load(pointer + k * stride).to(tl.float32),)
    if FORM == "quadratic":
        weights = gates
    else:
        weights = ()
        for b in tl.static_range(len(BASIS)):
            weight = 0.0
            for k in tl.static_range(M):
                if share(NAMES[k], BASIS[b]) != 0:
                    weight += share(NAMES[k], BASIS[b]) * gates[k]
            weights = weights + (weight,)
    return weights


@triton.jit
def _store_gate_gradients(pointer, row, lane_sums, FORM: tl.constexpr, NAMES: tl.constexpr, BASIS: tl.constexpr):
    """Adds the lanes up and stores one row of the contiguous (N, R) gradients."""
    sums = ()
    for k in tl.static_range(len(lane_sums)):
        sums = sums + (tl.sum(lane_sums[k], axis=0),)
    M: tl.constexpr = len(NAMES)
    R: tl.constexpr = M * (M + 1) // 2 if FORM == "quadratic" else M
    for k in tl.static_range(R):
        if FORM == "quadratic":
            gradient = sums[k]
        else:
            gradient = 0.0
            for b in tl.static_range(len(BASIS)):
                if share(NAMES[k], BASIS[b]) != 0:
                    gradient += share(NAMES[k], BASIS[b]) * sums[b]
        tl.store(pointer + row * R + k, gradient.to(pointer.dtype.element_ty))


@triton.jit
def _mix(weights, sigma):
    """sum_k weights_k sigma_k"""
    total = weights[0] * sigma[0]
    for k in tl.static_range(1, len(sigma)):
        total += weights[k] * sigma[k]
    return total


@triton.constexpr_function
def _pair(k, j, M):
    """The position of the pair k <= j in the order of `moa.mixing.pairs`, at compile time."""
    return k * M - k * (k - 1) // 2 + j - k


@triton.jit
def _partners_of_y(pi_kl, sigma_z):
    """What sigma_k(y) is multiplied with: sum_{l >= k} pi_kl sigma_l(z), for every k."""
    M: tl.constexpr = len(sigma_z)
    sums = ()
    for k in tl.static_range(M):
        total = pi_kl[_pair(k, k, M)] * sigma_z[k]
        for j in tl.static_range(k + 1, M):
            total += pi_kl[_pair(k, j, M)] * sigma_z[j]
        sums = sums + (total,)
    return sums


@triton.jit
def _partners_of_z(pi_kl, sigma_y):
    """What sigma_l(z) is multiplied with: sum_{k <= l} pi_kl sigma_k(y), for every l."""
    M: tl.constexpr = len(sigma_y)
    sums = ()
    for j in tl.static_range(M):
        total = pi_kl[_pair(0, j, M)] * sigma_y[0]
        for k in tl.static_range(1, j + 1):
            total += pi_kl[_pair(k, j, M)] * sigma_y[k]
        sums = sums + (total,)
    return sums


@triton.jit
def _zeros(COUNT: tl.constexpr, LANES: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((LANES,), tl.float32),)
    return sums


@triton.jit
def _lane_sum(tile):
    """(STEPS, LANES, VECTOR) -> (LANES,), without communication; see `_tile`."""
    return tl.sum(tl.sum(tile, axis=2), axis=0)


@triton.jit
def _add_products(sums, factor, sigma):
    """Adds factor * sigma_k over a tile to the lanes' sums, for every k."""
    added = ()
    for k in tl.static_range(len(sigma)):
        added = added + (sums[k] + _lane_sum(factor * sigma[k]),)
    return added


@triton.jit
def _add_pairs(sums, g, sigma_y, sigma_z):
    """Adds g * sigma_k(y) * sigma_l(z) over a tile to the lanes' sums, for every pair k <= l."""
    M: tl.constexpr = len(sigma_y)
    added = ()
    for k in tl.static_range(M):
        factor = g * sigma_y[k]
        for j in tl.static_range(k, M):
            added = added + (sums[_pair(k, j, M)] + _lane_sum(factor * sigma_z[j]),)
    return added
