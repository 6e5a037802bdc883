"""Small inputs with known right answers, from public reports of what other packages got wrong.

W = 4 and taps [1000, 100, 10, 1] make an output spell its own window: 7891 is 7, 8, 9 then 1.
"""

from __future__ import annotations

import pytest
import torch

from cases import assert_rounded, scale_of

TAPS = [1000, 100, 10, 1]
H = [7, 8, 9]
D = 8


def rows(values, device, dtype=torch.float32):
    """[1, T, D] with every channel alike."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(1, -1, 1).repeat(1, 1, D)


def state(*histories, device, dtype=torch.float32):
    """[N, D, L]"""
    return torch.tensor(histories, dtype=dtype, device=device)[:, None].repeat(1, D, 1)


def taps(device, values=TAPS, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device).repeat(D, 1)


def spelled(y) -> list:
    """The one row that all channels must share."""
    assert (y == y[..., :1]).all()
    return y[..., 0].flatten().tolist()


def columns(final) -> list:
    assert (final == final[:, :1]).all()
    return final[:, 0].tolist()


def cu(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


TABLE = {
    "P0": ([1, 2, 3, 4], None, [1, 12, 123, 1234], [2, 3, 4]),
    "P1": ([1, 2, 3, 4], H, [7891, 8912, 9123, 1234], [2, 3, 4]),
    "P2": ([1, 2], H, [7891, 8912], [9, 1, 2]),
    "P3": ([1], H, [7891], [8, 9, 1]),
    "P4": ([], H, [], [7, 8, 9]),
    "P5a": ([1], None, [1], [0, 0, 1]),
    "P5b": ([1, 2], None, [1, 12], [0, 1, 2]),
}


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_table_dense(kernel, device, case, dtype, state_dtype):
    """R57 too: exact whatever the state's dtype. 16-bit outputs are the exact ones rounded."""
    x, history, y, final = case
    initial = None if history is None else state(history, device=device, dtype=state_dtype)
    got, got_state = kernel.causal_conv1d(
        rows(x, device, dtype), taps(device), initial_state=initial, return_final_state=True,
        state_len=3,
    )  # fmt: skip
    assert spelled(got) == torch.tensor(y, dtype=torch.float32).to(dtype).tolist()
    assert columns(got_state) == [final]


PACKED = {
    "P6": ([1, 2, 3, 4, 5, 6], [0, 3, 4, 6], None, [1, 12, 123, 4, 5, 56],
           [[1, 2, 3], [0, 0, 4], [0, 5, 6]]),
    "P7": ([1, 2, 3, 4, 5, 6], [0, 3, 4, 6], [H, [2, 3, 5], [0, 0, 0]],
           [7891, 8912, 9123, 2354, 5, 56], [[1, 2, 3], [3, 5, 4], [0, 5, 6]]),
    "P8": ([1, 2, 3, 4, 5], [0, 2, 2, 5], [[0, 0, 0], H, [4, 4, 4]],
           [1, 12, 4443, 4434, 4345], [[0, 1, 2], H, [3, 4, 5]]),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED.keys())
def test_table_packed(kernel, device, case):
    x, bounds, histories, y, finals = case
    initial = None if histories is None else state(*histories, device=device)
    got, final = kernel.causal_conv1d(
        rows(x, device), taps(device), cu_seqlens=cu(bounds, device), initial_state=initial,
        return_final_state=True, state_len=3,
    )  # fmt: skip
    assert spelled(got) == y
    assert columns(final) == finals


@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_table_packed_in_16_bits(kernel, device, case, dtype):
    """Taps 8, 4, 2, 1 on digits up to 9: every partial sum is exact in bf16, so bits must agree."""
    x, bounds, histories, _, _ = case
    weight = [8, 4, 2, 1]
    y = []
    for n, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        stream = (histories[n] if histories else [0, 0, 0]) + x[a:b]
        y += [sum(w * v for w, v in zip(weight, stream[t:], strict=False)) for t in range(b - a)]
    initial = None if histories is None else state(*histories, device=device, dtype=dtype)
    got = kernel.causal_conv1d(
        rows(x, device, dtype), taps(device, weight, dtype), cu_seqlens=cu(bounds, device),
        initial_state=initial,
    )  # fmt: skip
    assert spelled(got) == y


@pytest.mark.parametrize("channels", [64, 72])
def test_r01_forward_and_one_decode_step(kernel, reference, device, channels):
    """The smoke test of a binary: a miscompiled one was off by 0.5 and left the state alone."""
    x = torch.randn(1, 33, channels, device=device).bfloat16()
    w = torch.randn(channels, 4, device=device).bfloat16()
    y, s = kernel.causal_conv1d(x[:, :32], w, return_final_state=True, state_len=3)
    exact, _ = reference.fwd(x, w)
    assert_rounded(y, exact[:, :32], scale_of(x, w, None))
    old = s.clone()
    z = kernel.causal_conv1d_update(x[:, 32], s, w)
    assert_rounded(z, exact[:, 32], scale_of(x, w, None))
    assert torch.equal(s, torch.cat([old[..., 1:], x[:, 32, :, None]], -1))


def test_r02a_oversized_state(kernel, device):
    s = state([3, 4, 7, 8, 9], device=device)
    assert spelled(kernel.causal_conv1d_update(rows([1], device)[0], s, taps(device))) == [7891]
    assert columns(s) == [[4, 7, 8, 9, 1]]


def test_r02b_circular_state(kernel, device):
    s = state([7, 8, 9], device=device)
    y = kernel.causal_conv1d_update(
        rows([1], device)[0], s, taps(device), cache_seqlens=cu([4], device)
    )
    assert spelled(y) == [8971]
    assert columns(s) == [[7, 1, 9]]


def test_r02c_width_five(kernel, device):
    s = state([6, 7, 8, 9], device=device)
    y = kernel.causal_conv1d_update(
        rows([1], device)[0], s, taps(device, [10000, 1000, 100, 10, 1])
    )
    assert spelled(y) == [67891]


def test_r03_width_wide_cache(kernel, device):
    s = state([6, 7, 8, 9], device=device)
    assert spelled(kernel.causal_conv1d_update(rows([1], device)[0], s, taps(device))) == [7891]
    assert columns(s) == [[7, 8, 9, 1]]
    s = state([float("nan"), 7, 8, 9], device=device)
    assert spelled(kernel.causal_conv1d_update(rows([1], device)[0], s, taps(device))) == [7891]
    assert columns(s) == [[7, 8, 9, 1]]


def test_r04_state_is_pre_conv(kernel, device):
    bias = torch.full((D,), 5.0, device=device)
    _, s = kernel.causal_conv1d(
        rows([1, 2, 3], device), taps(device), bias, activation="silu", return_final_state=True,
        state_len=3,
    )  # fmt: skip
    assert columns(s) == [[1, 2, 3]]
    assert spelled(kernel.causal_conv1d_update(rows([4], device)[0], s, taps(device))) == [1234]


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5])
def test_r05_tap_order_and_length(kernel, device, T):
    y = kernel.causal_conv1d(
        rows(list(range(1, T + 1)), device), taps(device), initial_state=state(H, device=device)
    )
    assert y.shape[1] == T and spelled(y)[0] == 7891


def test_r07_products_are_not_rounded(kernel, device):
    x = rows([1.0078125, 1.015625], device, torch.bfloat16)
    w = taps(device, [0, 0, 1.0078125, -1], torch.bfloat16)
    assert spelled(kernel.causal_conv1d(x, w))[1] == 2.0**-14


def test_r09_packed_rows_equal_rows_alone(kernel, device):
    lengths = [3, 1, 2, 40, 17]
    x, w = torch.randn(1, 63, D, device=device).bfloat16(), torch.randn(D, 4, device=device)
    bounds = [0, 3, 4, 6, 46, 63]
    y = kernel.causal_conv1d(x, w, activation="silu", cu_seqlens=cu(bounds, device))
    alone = [kernel.causal_conv1d(part, w, activation="silu") for part in x.split(lengths, 1)]
    assert torch.equal(y, torch.cat(alone, 1))


def test_r11_packed_width_three(kernel, device):
    y = kernel.causal_conv1d(
        rows([1, 2, 3, 4, 5, 6], device), taps(device, [100, 10, 1]),
        cu_seqlens=cu([0, 3, 4, 6], device),
    )  # fmt: skip
    assert spelled(y) == [1, 12, 123, 4, 5, 56]


def test_r14_offsets_over_batch_rows(kernel, device):
    x = rows([1, 2, 3, 4, 5, 6, 7, 8], device)
    two = kernel.causal_conv1d(x.view(2, 4, D), taps(device), cu_seqlens=cu([0, 4, 8], device))
    one = kernel.causal_conv1d(x, taps(device), cu_seqlens=cu([0, 4, 8], device))
    assert spelled(two) == [1, 12, 123, 1234, 5, 56, 567, 5678] == spelled(one)
    assert two.shape == (2, 4, D)


@pytest.mark.parametrize("cuts", [[64], [1, 2, 4], [37, 38, 90], list(range(1, 128))])
def test_r15_shards_chained_by_state(kernel, device, cuts):
    """Documents of 37, 51 and 40 tokens over shards that cut them anywhere, to 1 token each."""
    ends, w = [37, 88, 128], taps(device)
    x = torch.randn(1, 128, D, device=device)
    whole = kernel.causal_conv1d(x, w, cu_seqlens=cu([0, *ends], device))
    parts, carried, begin = [], torch.zeros(D, 3, device=device), 0
    for end in [*cuts, 128]:
        inside = [e - begin for e in ends if begin < e < end]
        bounds = [0, *inside, end - begin]
        initial = torch.zeros(len(bounds) - 1, D, 3, device=device)
        initial[0] = carried
        part, final = kernel.causal_conv1d(
            x[:, begin:end], w, cu_seqlens=cu(bounds, device), initial_state=initial,
            return_final_state=True, state_len=3,
        )  # fmt: skip
        parts.append(part)
        carried = torch.zeros_like(carried) if end in ends else final[-1]
        begin = end
    assert torch.equal(torch.cat(parts, 1), whole)


def test_r17_prefill_and_decode_rows_in_one_call(kernel, device):
    """P7 through the update of a pool: a prompt, a decode row and a continued chunk."""
    pool = state(H, [2, 3, 5], [0, 0, 0], device=device)
    y = kernel.causal_conv1d_update(
        rows([1, 2, 3, 4, 5, 6], device)[0], pool, taps(device), cu_seqlens=cu([0, 3, 4, 6], device)
    )
    assert spelled(y) == [7891, 8912, 9123, 2354, 5, 56]
    assert columns(pool) == [[1, 2, 3], [3, 5, 4], [0, 5, 6]]


def test_r18_one_answer_for_every_layout(kernel, device):
    """With seq_idx, an initial and a final state; the layout of y is x's."""
    values = torch.randn(2, 24, 9, device=device)
    wide = torch.empty(2, 9, 61, device=device)
    last = values.transpose(1, 2).contiguous().transpose(1, 2)
    views = [values, last, *(wide[..., i : i + 24].transpose(1, 2).copy_(last) for i in (0, 1, 31))]
    w, initial = torch.randn(24, 4, device=device), torch.randn(2, 24, 3, device=device)
    ids = torch.tensor([[0] * 2 + [1] * 7, [3] * 9], dtype=torch.int32, device=device)
    first = None
    for x in views:
        x.copy_(values)
        y, final = kernel.causal_conv1d_fn(x, w, None, ids, initial, True, activation="silu")
        first = first or (y, final)
        assert torch.equal(y, first[0]) and torch.equal(final, first[1])
        assert (y.stride(2) == 1) == (x.stride(2) == 1)


@pytest.mark.parametrize("bounds", [[0, 0, 3], [0, 3, 3], [0, 0, 0, 0]])
def test_r20_empty_segments(kernel, device, bounds):
    T, N = bounds[-1], len(bounds) - 1
    initial = state(*[H] * N, device=device)
    y, final = kernel.causal_conv1d(
        rows([1, 2, 3][:T], device), taps(device), cu_seqlens=cu(bounds, device),
        initial_state=initial, return_final_state=True, state_len=3,
    )  # fmt: skip
    assert spelled(y) == [7891, 8912, 9123][:T]
    for n in range(N):
        assert columns(final)[n] == ([1, 2, 3] if bounds[n + 1] > bounds[n] else H)


@pytest.mark.parametrize("n", range(1, 9))
def test_r28_first_of_many_equals_one(kernel, device, n):
    x = rows(list(range(1, n + 1)), device)
    one = kernel.causal_conv1d(x[:, :1], taps(device), initial_state=state(H, device=device))
    many = kernel.causal_conv1d(x, taps(device), initial_state=state(H, device=device))
    assert torch.equal(many[:, :1], one) and spelled(one) == [7891]


@pytest.mark.parametrize("prompt, expected", [([1], 13), ([1, 2], 123)])
def test_r29_prompt_shorter_than_history(kernel, device, prompt, expected):
    _, s = kernel.causal_conv1d(
        rows(prompt, device), taps(device), return_final_state=True, state_len=3
    )
    y = kernel.causal_conv1d_update(rows([3], device)[0], s, taps(device))
    assert spelled(y) == [expected]


@pytest.mark.parametrize("stale", [H, [float("nan")] * 3])
def test_r31_stale_slot(kernel, device, stale):
    pool = state(stale, device=device)
    y, _ = kernel.causal_conv1d(
        rows([1, 2], device), taps(device), initial_state=pool,
        state_indices=cu([0], device), has_initial_state=torch.tensor([False], device=device),
        return_final_state=True,
    )  # fmt: skip
    assert spelled(y) == [1, 12]
    assert columns(pool) == [[0, 1, 2]]


def test_r32_one_token_with_or_without_a_time_axis(kernel, device):
    states = [state(H, H, device=device) for _ in range(2)]
    x = torch.randn(2, D, device=device)
    flat = kernel.causal_conv1d_update(x, states[0], taps(device))
    deep = kernel.causal_conv1d_update(x[..., None], states[1], taps(device))
    assert flat.shape == (2, D) and deep.shape == (2, D, 1)
    assert torch.equal(flat, deep[..., 0]) and torch.equal(*states)


@pytest.mark.parametrize("B", [1, 2])
def test_r35_left_padding_does_not_depend_on_the_batch(kernel, device, B):
    x = rows([5, 6, 1, 2], device).repeat(B, 1, 1)
    ids = torch.tensor([[-1, -1, 0, 0]], dtype=torch.int32, device=device).repeat(B, 1)
    y, final = kernel.causal_conv1d(
        x, taps(device), seq_idx=ids, return_final_state=True, state_len=3
    )
    assert spelled(y) == [0, 0, 1, 12] * B
    assert columns(final) == [[0, 1, 2]] * B


def test_r36_bias_reaches_pads_unless_masked_after(kernel, device):
    """Zeroed pads still give act(bias): seq_idx = -1 is how to have zeros there."""
    x = rows([0, 0, 1, 2], device)
    bias = torch.full((D,), 3.0, device=device)
    assert spelled(kernel.causal_conv1d(x, taps(device), bias)) == [3, 3, 4, 15]
    ids = torch.tensor([[-1, -1, 0, 0]], dtype=torch.int32, device=device)
    assert spelled(kernel.causal_conv1d(x, taps(device), bias, seq_idx=ids)) == [0, 0, 4, 15]


@pytest.mark.parametrize("pad", [0.0, 9.0, float("nan")])
def test_r37_state_is_not_taken_from_right_pads(kernel, device, pad):
    x = torch.cat([rows([1, 2, pad, pad], device), rows([1, 2, 3, 4], device)])
    ids = torch.tensor([[0, 0, -1, -1], [0, 0, 0, 0]], dtype=torch.int32, device=device)
    _, final = kernel.causal_conv1d(
        x, taps(device), seq_idx=ids, return_final_state=True, state_len=3
    )
    assert columns(final) == [[0, 1, 2], [2, 3, 4]]


@pytest.mark.parametrize(
    "accepted, expected",
    [(0, [7894, 8945, 9456]), (1, [8914, 9145, 1456]), (2, [9124, 1245, 2456]),
     (3, [1234, 2345, 3456])],
)  # fmt: skip
@pytest.mark.parametrize("move", [False, True])
def test_r39_r40_rejected_drafts(kernel, device, accepted, expected, move):
    """R40: the pool row may be moved between the calls."""
    pool = torch.full((4, D, 6), float("nan"), device=device)
    pool[1] = state([0, 0, 0, *H], device=device)[0]
    draft = rows([1, 2, 3], device).transpose(1, 2)
    y = kernel.causal_conv1d_update(
        draft, pool, taps(device), conv_state_indices=cu([1], device),
        num_accepted_tokens=cu([3], device),
    )  # fmt: skip
    assert spelled(y.transpose(1, 2)) == [7891, 8912, 9123]
    slot = 1
    if move:
        pool[3] = pool[1]
        pool[1] = float("nan")
        slot = 3
    y = kernel.causal_conv1d_update(
        rows([4, 5, 6], device).transpose(1, 2), pool, taps(device),
        conv_state_indices=cu([slot], device), num_accepted_tokens=cu([accepted], device),
    )  # fmt: skip
    assert spelled(y.transpose(1, 2)) == expected


def test_r42_reordered_states(kernel, device):
    s = state(H, [1, 1, 1], device=device)[[1, 1]]
    x = torch.tensor([[2.0], [3.0]], device=device).repeat(1, D)
    y = kernel.causal_conv1d_update(x, s, taps(device))
    assert y[:, 0].tolist() == [1112, 1113]
    assert columns(s) == [[1, 1, 2], [1, 1, 3]]


def test_r43_requests_in_slots(kernel, device):
    x = torch.randn(1, 6, D, device=device)
    pool = torch.randn(8, D, 3, device=device)
    before = pool.clone()
    y, _ = kernel.causal_conv1d(
        x, taps(device), cu_seqlens=cu([0, 3, 4, 6], device), initial_state=pool,
        state_indices=cu([5, 0, 3], device), return_final_state=True,
        has_initial_state=torch.tensor([False, True, False], device=device),
    )  # fmt: skip
    for slot, (a, b), flag in ((5, (0, 3), False), (0, (3, 4), True), (3, (4, 6), False)):
        alone, final = kernel.causal_conv1d(
            x[:, a:b], taps(device), return_final_state=True, state_len=3,
            initial_state=before[slot : slot + 1].clone() if flag else None,
        )  # fmt: skip
        assert torch.equal(y[:, a:b], alone) and torch.equal(pool[slot], final[0])
    for slot in (1, 2, 4, 6, 7):
        assert torch.equal(pool[slot], before[slot])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_r44_padding_rows_and_live_slots(kernel, device, index):
    pool = state([1, 1, 1], [4, 4, 4], H, device=device)
    x = torch.tensor([[1.0], [5.0], [2.0]], device=device).repeat(1, D)
    slots = torch.tensor([2, -1, 0], dtype=index, device=device)
    y = kernel.causal_conv1d_update(x, pool, taps(device), conv_state_indices=slots)
    assert y[:, 0].tolist() == [7891, 0, 1112]
    assert columns(pool) == [[1, 1, 2], [4, 4, 4], [8, 9, 1]]


def test_r45_more_rows_than_slots(kernel, device):
    pool = torch.randn(5, D, 4, device=device)
    slots = cu([0, 1, 2, 3, 4, -1, -1, -1], device)
    y = kernel.causal_conv1d_update(
        torch.randn(8, D, device=device), pool, taps(device), conv_state_indices=slots
    )
    assert (y[5:] == 0).all()


@pytest.mark.parametrize("pitch", [514, 386, 2570, 385])
@pytest.mark.parametrize("start", [0, 1, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r48_any_pitch_and_offset(kernel, device, pitch, start, dtype):
    """Slices of a fused projection, as causal-conv1d users pass them."""
    base = torch.randn(2, 5, pitch, device=device).to(dtype)
    width = 64 if pitch < 500 else 384
    x = base[:, :, start : start + width].transpose(1, 2)
    w = torch.randn(width, 4, device=device).to(dtype)
    y = kernel.causal_conv1d_fn(x, w, activation="silu")
    same = kernel.causal_conv1d_fn(x.contiguous(), w, activation="silu")
    assert torch.equal(y, same)


@pytest.mark.parametrize("channels", [1, 3, 12, 20])
def test_r48_any_channel_count(kernel, device, channels):
    x = torch.arange(4.0, device=device).reshape(1, 4, 1).repeat(1, 1, channels) + 1
    y = kernel.causal_conv1d(x, taps(device)[:1].repeat(channels, 1))
    assert spelled(y) == [1, 12, 123, 1234]


def test_r50_width_one(kernel, device):
    x = torch.randn(1, 4, D, device=device)
    w = torch.randn(D, 1, device=device)
    y, s = kernel.causal_conv1d(x, w, return_final_state=True, state_len=0)
    assert torch.equal(y, x * w[:, 0]) and s.shape == (1, D, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r54_final_state_over_tile_borders(kernel, device, dtype):
    """Every T to 40 and around 1024 and 2048: the last three inputs, exactly."""
    for T in [*range(1, 41), *range(1020, 1033), *range(2044, 2053)]:
        x = torch.randn(1, T, D, device=device).to(dtype)
        _, s = kernel.causal_conv1d(x, taps(device), return_final_state=True, state_len=3)
        expected = torch.nn.functional.pad(x, (0, 0, 3, 0))[0, -3:].t()
        assert torch.equal(s[0], expected), T


def test_r55_slot_outside_the_pool(kernel, device):
    guard = torch.full((5, D, 4), 3.0, device=device)
    pool = guard[1:4]
    y = kernel.causal_conv1d_update(
        torch.ones(2, D, device=device), pool, taps(device), conv_state_indices=cu([3, 99], device)
    )
    assert (y == 0).all() and (guard == 3.0).all()
    with kernel.checking(), pytest.raises(ValueError, match=r"conv_state_indices\[0\] = 3"):
        kernel.causal_conv1d_update(
            torch.ones(2, D, device=device), pool, taps(device),
            conv_state_indices=cu([3, 99], device),
        )  # fmt: skip


def test_r58_fp32_weights_stay_fp32(kernel, device):
    x = rows([1024, 1024], device, torch.bfloat16)
    w = taps(device, [0, 0, 1.0009765625, -1])
    assert spelled(kernel.causal_conv1d(x, w))[1] == 1.0


def test_r59_activation_is_fused_before_rounding(kernel, device):
    one = torch.ones(D, 1, device=device)
    for before, after in ((4.01, 3.9375), (1.00390625, 0.734375)):
        y = kernel.causal_conv1d(
            torch.ones(1, 1, D, dtype=torch.bfloat16, device=device), one * before,
            activation="swish",
        )  # fmt: skip
        assert spelled(y) == [after]


def test_r63_r65_benchmark_sizes(kernel, device):
    """A size at which older kernels were wrong, by comparison of halves."""
    x = torch.randn(2, 1024, 2048, device=device).to(torch.bfloat16)
    w = torch.randn(2048, 4, device=device).to(torch.bfloat16)
    y = kernel.causal_conv1d(x, w, activation="silu")
    tail, _ = kernel.causal_conv1d(
        x[:, 512:], w, activation="silu", return_final_state=True,
        initial_state=x[:, 509:512].transpose(1, 2),
    )  # fmt: skip
    assert torch.equal(y[:, 512:], tail)


def gradient_row(gradient) -> list:
    """[B, T, D] or [D, W]: the values that all channels must share."""
    last = gradient if gradient.dim() == 2 else gradient.flatten(0, 1).t()
    assert (last == last[:1]).all()
    return last[0].tolist()


# x, history, dy, gradient of the final state; dx, dh0, dw. dy None: ones.
GRADIENTS = {
    "G1": ([1, 2, 3, 4], None, None, None, [1111, 111, 11, 1], None, [1, 3, 6, 10]),
    "G2": ([1, 2, 3, 4], H, None, None, [1111, 111, 11, 1], [1000, 1100, 1110], [25, 20, 15, 10]),
    "G3": ([1], H, [0], [5, 6, 7], [7], [0, 5, 6], [0, 0, 0, 0]),
    "G4": ([1, 2], H, [0, 0], [5, 6, 7], [6, 7], [0, 0, 5], [0, 0, 0, 0]),
    "G5": ([1], H, [1], [0, 0, 0], [1], [1000, 100, 10], [7, 8, 9, 1]),
    "G6": ([1, 2, 3, 4, 5], H, [0] * 5, [5, 6, 7], [0, 0, 5, 6, 7], [0, 0, 0], [0, 0, 0, 0]),
}


@pytest.mark.parametrize("case", GRADIENTS.values(), ids=GRADIENTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_table_of_gradients(kernel, device, case, dtype, state_dtype):
    """Exact sums, rounded to the dtype of what they are the gradient of."""
    x, history, dy, dfinal, dx, dh, dw = case
    inputs = [rows(x, device, dtype), taps(device)]
    if history is not None:
        inputs.append(state(history, device=device, dtype=state_dtype))
    inputs = [t.requires_grad_() for t in inputs]
    y, final = kernel.causal_conv1d(
        *inputs[:2], initial_state=inputs[2] if history else None, return_final_state=True,
        state_len=3,
    )  # fmt: skip
    outputs, grads = [y], [torch.ones_like(y) if dy is None else rows(dy, device, dtype)]
    if dfinal is not None:
        outputs.append(final)
        grads.append(state(dfinal, device=device, dtype=final.dtype))
    got = torch.autograd.grad(outputs, inputs, grads)
    assert gradient_row(got[0]) == torch.tensor(dx, dtype=torch.float32).to(dtype).tolist()
    assert gradient_row(got[1]) == dw
    if history is not None:
        expected = torch.tensor([dh], dtype=torch.float32).to(state_dtype)
        assert columns(got[2]) == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["cu_seqlens", "seq_idx"])
def test_g7_packed_gradients(kernel, device, by, dtype):
    """R09, R19: no gradient crosses a boundary, dweight's neither."""
    packing = {"cu_seqlens": cu([0, 3, 4, 6], device)}
    if by == "seq_idx":
        packing = {"seq_idx": cu([[0, 0, 0, 1, 2, 2]], device)}
    x, w = rows([1, 2, 3, 4, 5, 6], device, dtype).requires_grad_(), taps(device).requires_grad_()
    kernel.causal_conv1d(x, w, **packing).sum().backward()
    assert gradient_row(x.grad) == [111, 11, 1, 1, 11, 1]
    assert gradient_row(w.grad) == [0, 1, 8, 21]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_exact(kernel, device, dtype):
    """G2 on taps 8, 4, 2, 1 and digits up to 3: every sum is exact, so bits must agree."""
    x, history = rows([1, 2, 3, 0], device, dtype), state([3, 1, 2], device=device, dtype=dtype)
    w = taps(device, [8, 4, 2, 1], dtype)
    inputs = [t.requires_grad_() for t in (x, w, history)]
    y = kernel.causal_conv1d(x, w, initial_state=history)
    dx, dw, dh = torch.autograd.grad(y.sum(), inputs)
    assert gradient_row(dx) == [15, 7, 3, 1]
    assert gradient_row(dw) == [7, 6, 8, 6]
    assert columns(dh) == [[8, 12, 14]]
    assert (dx.dtype, dw.dtype, dh.dtype) == (dtype, dtype, dtype)


def test_r10_a_loss_on_one_segment_reaches_no_other(kernel, device):
    x = torch.randn(1, 6, D, device=device, requires_grad=True)
    w = torch.randn(D, 4, device=device)
    y = kernel.causal_conv1d(x, w, activation="silu", cu_seqlens=cu([0, 3, 4, 6], device))
    (dx,) = torch.autograd.grad(y[:, 4:].square().sum(), x)
    assert (dx[:, :4] == 0).all() and (dx[:, 4:] != 0).any()


@pytest.mark.parametrize("shards", [[64, 64], [1, 1, 2, 60, 64]])
def test_r15_gradients_flow_back_through_shards(kernel, device, shards):
    """Context parallelism by hand: the state's gradient of one shard is the final state's of the
    one before, and a shard may be shorter than the history."""
    x = torch.randn(1, 128, D, device=device, requires_grad=True)
    w = torch.randn(D, 4, device=device, requires_grad=True)
    dy = torch.randn(1, 128, D, device=device)
    whole = torch.autograd.grad(kernel.causal_conv1d(x, w, activation="silu"), (x, w), dy)
    carried, ys, states = torch.zeros(1, D, 3, device=device), [], []
    for part in x.split(shards, 1):
        before = carried.detach().requires_grad_()
        y, final = kernel.causal_conv1d(
            part, w, activation="silu", initial_state=before, return_final_state=True, state_len=3
        )
        ys.append(y)
        states.append((before, final))
        carried = final
    dx, dw, incoming = torch.zeros_like(x), torch.zeros_like(w), torch.zeros(1, D, 3, device=device)
    for y, (before, final), part in reversed(
        list(zip(ys, states, dy.split(shards, 1), strict=True))
    ):
        a, b, incoming = torch.autograd.grad((y, final), (x, w, before), (part, incoming))
        dx += a
        dw += b
    torch.testing.assert_close(dx, whole[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dw, whole[1], rtol=1e-5, atol=1e-5)


def test_r17_gradients_of_states_per_segment(kernel, device):
    """P7 backward: each segment's own history gets the taps that reach into it."""
    initial = state(H, [2, 3, 5], [0, 0, 0], device=device).requires_grad_()
    y = kernel.causal_conv1d(
        rows([1, 2, 3, 4, 5, 6], device), taps(device), cu_seqlens=cu([0, 3, 4, 6], device),
        initial_state=initial,
    )  # fmt: skip
    y.sum().backward()
    assert columns(initial.grad) == [[1000, 1100, 1110], [1000, 100, 10], [1000, 1100, 110]]


@pytest.mark.parametrize("bounds", [[0, 0, 3], [0, 3, 3], [0, 0, 0, 0]])
def test_r20_gradients_of_empty_segments(kernel, device, bounds):
    """Their state passes through, and so does its gradient."""
    T, N = bounds[-1], len(bounds) - 1
    initial = state(*[H] * N, device=device).requires_grad_()
    x = rows([1, 2, 3][:T], device).requires_grad_()
    y, final = kernel.causal_conv1d(
        x, taps(device), cu_seqlens=cu(bounds, device), initial_state=initial,
        return_final_state=True, state_len=3,
    )  # fmt: skip
    incoming = state(*[[5, 6, 7]] * N, device=device)
    dx, dh = torch.autograd.grad((y, final), (x, initial), (torch.zeros_like(y), incoming))
    assert gradient_row(dx) == [5, 6, 7][:T]
    for n in range(N):
        assert columns(dh)[n] == ([0, 0, 0] if bounds[n + 1] > bounds[n] else [5, 6, 7])


@pytest.mark.parametrize("pad", [0.0, 9.0, float("nan")])
def test_r38_pads_get_and_give_no_gradient(kernel, device, pad):
    """Left and right, with a bias: dx at pads is 0, dw and db are the unpadded run's."""
    ids = cu([[-1, -1, 0, 0, 0, -1]], device)
    x = rows([pad, pad, 1, 2, 3, pad], device).requires_grad_()
    w, b = taps(device).requires_grad_(), torch.full((D,), 5.0, device=device, requires_grad=True)
    got = torch.autograd.grad(kernel.causal_conv1d(x, w, b, seq_idx=ids).sum(), (x, w, b))
    assert gradient_row(got[0]) == [0, 0, 111, 11, 1, 0]
    real = x.detach()[:, 2:5].requires_grad_()
    alone = torch.autograd.grad(kernel.causal_conv1d(real, w, b).sum(), (real, w, b))
    assert torch.equal(got[1], alone[1]) and torch.equal(got[2], alone[2])
    assert got[2].tolist() == [3.0] * D


@pytest.mark.parametrize("pitch", [514, 386, 385])
@pytest.mark.parametrize("start", [0, 1, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r48_any_pitch_and_offset_of_dy(kernel, device, pitch, start, dtype):
    """Shapes that elsewhere fail only in backward, since dy's pitch is tested there."""
    base = torch.randn(2, 5, pitch, device=device).to(dtype)
    x, dy = (base[:, :, start : start + 64].transpose(1, 2) for _ in range(2))
    w = torch.randn(64, 4, device=device).to(dtype).requires_grad_()
    results = []
    for a, g in ((x, dy), (x.contiguous(), dy.contiguous())):
        a = a.detach().requires_grad_()
        y = kernel.causal_conv1d_fn(a, w, activation="silu")
        results.append(torch.autograd.grad(y, (a, w), g))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=2**-8, atol=1e-5)


def test_r54_gradients_of_final_states_over_tile_borders(kernel, device):
    """Every T to 40 and around 1024 and 2048: the gradient lands on the last three rows."""
    incoming = state([5, 6, 7], device=device)
    for T in [*range(1, 41), *range(1020, 1033), *range(2044, 2053)]:
        x = torch.ones(1, T, D, device=device, requires_grad=True)
        _, s = kernel.causal_conv1d(x, taps(device), return_final_state=True, state_len=3)
        (dx,) = torch.autograd.grad(s, x, incoming)
        assert gradient_row(dx) == ([0] * T + [5, 6, 7])[3:][-T:], T


def test_r58_gradients_of_fp32_weights_are_fp32(kernel, device):
    """A sum that bf16 cannot hold: 2^10 + 2^-10."""
    x = rows([1024, 2.0**-10], device, torch.bfloat16)
    w = taps(device).requires_grad_()
    kernel.causal_conv1d(x, w).sum().backward()
    assert w.grad.dtype == torch.float32
    assert gradient_row(w.grad) == [0, 0, 1024, 1024 + 2.0**-10]
