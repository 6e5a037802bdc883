"""What only a GPU shows: streams, graphs replayed with rewritten inputs, offsets past 2^31."""

from __future__ import annotations

import pytest
import torch

from cases import assert_rounded, offsets, scale_of

pytestmark = pytest.mark.gpu


def test_bf16_forward_is_the_rounded_reference_at_model_size(kernel, reference, device):
    x = torch.randn(1, 300, 8192, device=device).bfloat16()
    w = torch.randn(8192, 4, device=device).bfloat16()
    y = kernel.causal_conv1d(x, w, activation="silu")
    exact, _ = reference.fwd(x, w, silu=True)
    assert_rounded(y, exact, scale_of(x, w, None))


def backward(kernel, x, dy, weight, **options):
    """Gradients of x and weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = kernel.causal_conv1d(x, weight, activation="silu", **options)
    return torch.autograd.grad(y, (x, weight), dy)


def test_bf16_backward_is_the_rounded_reference_at_model_size(kernel, reference, device):
    x, dy = (torch.randn(1, 300, 8192, device=device).bfloat16() for _ in range(2))
    w = torch.randn(8192, 4, device=device)
    exact = reference.bwd(x, dy, w, silu=True)
    terms = reference.bwd(x.abs(), 1.1 * dy.double().abs(), w.abs())
    few = 1 + scale_of(x, w, None)
    for got, value, sums, n in zip(
        backward(kernel, x, dy, w), exact, terms, (0, 300), strict=False
    ):
        assert_rounded(got, value, (few + n / 8) * sums)


@pytest.mark.parametrize("T", [4096, 32768])
@pytest.mark.parametrize("D", [4128, 8192])
def test_r26_gradients_are_reproducible_at_size(kernel, device, T, D):
    """Bitwise in 20 runs, without any switch."""
    B = 4 if T == 4096 else 1
    x, dy = (torch.randn(B, T, D, device=device).bfloat16() for _ in range(2))
    w = torch.randn(D, 4, device=device)
    expected = backward(kernel, x, dy, w)
    for _ in range(20):
        for a, b in zip(backward(kernel, x, dy, w), expected, strict=True):
            assert torch.equal(a, b)


def test_backward_follows_the_current_stream(kernel, device):
    """It waits for that stream's writer of dy, and the poison that comes after is not seen."""
    stream = torch.cuda.Stream()
    w = torch.randn(8192, 4, device=device)
    x, clean = (torch.randn(1, 2048, 8192, device=device) for _ in range(2))
    expected = backward(kernel, x, clean, w)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(stream):
            dy = torch.full_like(clean, float("nan"))
            torch.cuda._sleep(2_000_000)
            dy.copy_(clean)
            got = backward(kernel, x, dy, w)
            dy.fill_(float("nan"))
        stream.synchronize()
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)


def test_forward_on_one_stream_backward_called_from_another(kernel, device):
    """autograd runs a node on its forward's stream and orders the two."""
    x = torch.randn(1, 2048, 1024, device=device)
    w, dy = torch.randn(1024, 4, device=device), torch.randn_like(x)
    expected = backward(kernel, x, dy, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x, w = x.requires_grad_(), w.requires_grad_()
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)
        y = kernel.causal_conv1d(x, w, activation="silu")
    torch.cuda.current_stream().wait_stream(side)
    got = torch.autograd.grad(y, (x, w), dy)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_current_stream_and_lifetime(kernel, device):
    """Work goes to the caller's stream: it waits for that stream's writer, poison comes after."""
    stream = torch.cuda.Stream()
    w = torch.randn(8192, 4, device=device)
    clean = torch.randn(1, 2048, 8192, device=device)
    expected = kernel.causal_conv1d(clean, w)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(stream):
            x = torch.full_like(clean, float("nan"))
            torch.cuda._sleep(2_000_000)
            x.copy_(clean)
            y = kernel.causal_conv1d(x, w)
            x.fill_(float("nan"))
        stream.synchronize()
        assert torch.equal(y, expected)


def test_r60_a_device_that_is_not_current(kernel, device):
    """Right answers, the current device left as it was, mixed devices refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    current, there = torch.cuda.current_device(), torch.device("cuda", 1)
    x, w = torch.randn(1, 500, 256, device=device), torch.randn(256, 4, device=device)
    y, state = kernel.causal_conv1d(x, w, return_final_state=True)
    far, moved = kernel.causal_conv1d(x.to(there), w.to(there), return_final_state=True)
    assert far.device == there and torch.equal(far.to(device), y)
    z = kernel.causal_conv1d_update(x[:, 0], state, w)
    far = kernel.causal_conv1d_update(x[:, 0].to(there), moved, w.to(there))
    assert torch.equal(far.to(device), z) and torch.equal(moved.to(device), state)
    dy = torch.randn_like(x)
    for a, b in zip(backward(kernel, x.to(there), dy.to(there), w.to(there)),
                    backward(kernel, x, dy, w), strict=True):  # fmt: skip
        assert a.device == there and torch.equal(a.to(device), b)
    assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match="weight must be on x's device cuda:1, got cuda:0"):
        kernel.causal_conv1d(x.to(there), w)


@pytest.fixture
def no_sync():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_no_call_waits_for_the_device(kernel, device, no_sync):
    x, w = torch.randn(1, 40, 64, device=device), torch.randn(64, 4, device=device)
    cu = torch.arange(0, 41, 10, dtype=torch.int32, device=device)
    pool = torch.randn(6, 64, 6, device=device)
    slots = torch.arange(4, device=device)
    kernel.causal_conv1d(
        x, w, cu_seqlens=cu, initial_state=pool, state_indices=slots, return_final_state=True,
        has_initial_state=torch.ones(4, dtype=torch.bool, device=device),
    )  # fmt: skip
    kernel.causal_conv1d(x, w, seq_idx=torch.zeros(1, 40, dtype=torch.int32, device=device))
    kernel.causal_conv1d_update(
        x[0], pool, w, conv_state_indices=slots, cu_seqlens=cu, num_accepted_tokens=slots
    )
    kernel.causal_conv1d_varlen_states(x[0], cu, 4)
    backward(kernel, x, x, w, cu_seqlens=cu)
    assert kernel.why_not("causal_conv1d", x, w, cu_seqlens=cu) is None


def capture(run):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = run()
    torch.cuda.synchronize()
    return graph, result


def test_graph_replay_with_rewritten_offsets(kernel, device):
    x, w = torch.randn(1, 40, 256, device=device), torch.randn(256, 4, device=device)
    cu = offsets([10, 30, 0], device)
    initial = torch.randn(3, 256, 4, device=device)
    graph, (y, final) = capture(
        lambda: kernel.causal_conv1d(
            x, w, cu_seqlens=cu, initial_state=initial, return_final_state=True
        )
    )
    for lengths in ([10, 30, 0], [1, 2, 37], [0, 0, 40], [5, 5, 5]):
        cu.copy_(offsets(lengths, device))
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        again, states = kernel.causal_conv1d(
            x, w, cu_seqlens=cu, initial_state=initial, return_final_state=True
        )
        assert torch.equal(y, again) and torch.equal(final, states)


def test_graph_replay_of_training_with_rewritten_offsets(kernel, device):
    """Forward and backward in one graph, the workspace in its pool."""
    x, dy = (torch.randn(1, 400, 256, device=device) for _ in range(2))
    w, cu = torch.randn(256, 4, device=device), offsets([100, 300, 0], device)
    graph, gradients = capture(lambda: backward(kernel, x, dy, w, cu_seqlens=cu))
    for lengths in ([100, 300, 0], [1, 2, 397], [0, 0, 400], [50, 50, 50]):
        cu.copy_(offsets(lengths, device))
        x.normal_()
        dy.normal_()
        for gradient in gradients:
            gradient.fill_(float("nan"))
        graph.replay()
        expected = backward(kernel, x, dy, w, cu_seqlens=cu)
        for a, b in zip(gradients, expected, strict=True):
            assert torch.equal(a, b)


def test_graph_replay_of_decode_with_rewritten_slots(kernel, device):
    x, w = torch.randn(4, 256, device=device), torch.randn(256, 4, device=device)
    pool = torch.randn(9, 256, 4, device=device)
    slots = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=device)
    start = pool.clone()
    graph, y = capture(
        lambda: kernel.causal_conv1d_update(x, pool, w, activation="silu", conv_state_indices=slots)
    )
    pool.copy_(start)
    twin = start.clone()
    for chosen in ([0, 1, 2, 3], [8, -1, 0, 5], [-1, -1, -1, -1], [3, 99, 7, 1]):
        slots.copy_(torch.tensor(chosen, device=device))
        x.normal_()
        graph.replay()
        expected = kernel.causal_conv1d_update(
            x, twin, w, activation="silu", conv_state_indices=slots
        )
        assert torch.equal(y, expected) and torch.equal(pool, twin)


def test_graph_replay_of_speculation_with_rewritten_counts(kernel, device):
    """Varlen rows of a padded batch: offsets, slots and accepted counts all change on replay."""
    x, w = torch.randn(12, 256, device=device), torch.randn(256, 4, device=device)
    pool = torch.randn(6, 256, 7, device=device)
    cu, slots, accepted = (
        torch.tensor(v, dtype=torch.int32, device=device)
        for v in ([0, 4, 8, 12], [0, 1, 2], [4, 4, 4])
    )
    packing = {"cu_seqlens": cu, "conv_state_indices": slots, "num_accepted_tokens": accepted}
    out, start = torch.zeros_like(x), pool.clone()
    graph, _ = capture(lambda: kernel.causal_conv1d_update(x, pool, w, out=out, **packing))
    pool.copy_(start)
    twin = start.clone()
    for c, s, a in (
        ([0, 4, 8, 12], [5, 0, 3], [0, 1, 4]),
        ([0, 1, 1, 12], [1, -1, 2], [3, 2, 2]),
        ([0, 0, 0, 0], [0, 1, 2], [0, 0, 0]),
    ):
        for tensor, values in zip((cu, slots, accepted), (c, s, a), strict=True):
            tensor.copy_(torch.tensor(values, device=device))
        x.normal_()
        graph.replay()
        again = out.clone()
        kernel.causal_conv1d_update(x, twin, w, out=again, **packing)
        assert torch.equal(out, again) and torch.equal(pool, twin)


@pytest.mark.parametrize("pitch, T", [(36864, 58300), (36864, 120000)])
def test_row_pitch_times_token_past_31_and_32_bits(kernel, device, pitch, T):
    """R52: a narrow slice of a wide projection; the last rows equal a small copy of the tail."""
    D = 64
    base = torch.empty(T, pitch, dtype=torch.bfloat16, device=device)
    assert base.numel() > (2**31 if T < 60000 else 2**32)
    x = base[:, :D].unsqueeze(0)
    x.normal_()
    w = torch.randn(D, 4, device=device)
    y, final = kernel.causal_conv1d(x, w, activation="silu", return_final_state=True, out=(
        torch.empty_like(base)[:, :D].unsqueeze(0)
    ))  # fmt: skip
    tail = x[:, -50:].clone()
    short = kernel.causal_conv1d(tail, w, activation="silu")
    assert torch.equal(y[:, -40:], short[:, -40:])
    assert torch.equal(final[0], x[0, -4:].t())


def test_backward_of_a_pitch_past_31_bits(kernel, device):
    """R52 backward: x and dy are narrow slices of wide projections; dx of the tail equals a small
    copy's, and dweight is that of contiguous copies."""
    T, pitch, D = 58300, 36864, 64
    wide = torch.empty(T, pitch, dtype=torch.bfloat16, device=device)
    assert wide.numel() > 2**31
    x, dy = (wide[:, i : i + D].unsqueeze(0).normal_() for i in (0, 128))
    w = torch.randn(D, 4, device=device)
    dx, dw = backward(kernel, x, dy, w)
    near = backward(kernel, x.contiguous(), dy.contiguous(), w)
    tail = backward(kernel, x[:, -50:].contiguous(), dy[:, -50:].contiguous(), w)
    assert torch.equal(dx, near[0]) and torch.equal(dx[:, -40:], tail[0][:, -40:])
    torch.testing.assert_close(dw, near[1], rtol=1e-4, atol=T**0.5 * 1e-4)


def test_backward_past_32_bits(kernel, device):
    """2^32 + elements, by comparison of dx with the tail's own."""
    T, D = 2**19 + 37, 8192
    x = torch.empty(1, T, D, dtype=torch.bfloat16, device=device).normal_()
    w = torch.randn(D, 4, device=device)
    dx, _ = backward(kernel, x, x, w)
    tail, _ = backward(kernel, x[:, -100:], x[:, -100:], w)
    assert torch.equal(dx[:, -90:], tail[:, -90:])


def test_contiguous_past_32_bits(kernel, device):
    """2^32 + elements, dense, by comparison with its own tail."""
    T, D = 2**19 + 37, 8192
    x = torch.empty(1, T, D, dtype=torch.bfloat16, device=device).normal_()
    w = torch.randn(D, 4, device=device)
    y = kernel.causal_conv1d(x, w, activation="silu")
    tail = kernel.causal_conv1d(x[:, -100:], w, activation="silu")
    assert torch.equal(y[:, -90:], tail[:, -90:])


def test_channel_first_past_31_bits(kernel, device):
    T, D = 2**20 + 5, 2050
    x = torch.empty(1, D, T, dtype=torch.bfloat16, device=device).normal_().transpose(1, 2)
    w = torch.randn(D, 4, device=device)
    y = kernel.causal_conv1d(x, w)
    tail = kernel.causal_conv1d(x[:, -60:], w)
    assert y.stride() == x.stride() and torch.equal(y[:, -50:], tail[:, -50:])


def test_state_pool_past_31_bits(kernel, device):
    D, S = 8192, 2**16 + 9
    pool = torch.empty(S, D, 4, dtype=torch.bfloat16, device=device).normal_()
    assert pool.numel() > 2**31
    slots = torch.tensor([S - 1, 0, S - 7], dtype=torch.int32, device=device)
    x, w = torch.randn(3, D, device=device).bfloat16(), torch.randn(D, 4, device=device)
    small = pool[slots.long()].clone()
    y = kernel.causal_conv1d_update(x, pool, w, conv_state_indices=slots)
    assert torch.equal(y, kernel.causal_conv1d_update(x, small, w))
    assert torch.equal(pool[slots.long()], small)


def test_more_sequences_than_a_grid_dimension(kernel, device):
    """Past 65535 sequences, in prefill heads and in decode rows."""
    N, D = 70_001, 16
    x = torch.randn(1, N, D, device=device)
    w = torch.randn(D, 4, device=device)
    state = torch.randn(N, D, 4, device=device)
    twin = state.clone()
    y = kernel.causal_conv1d(
        x, w, cu_seqlens=torch.arange(N + 1, device=device), initial_state=state,
        final_state_out=state,
    )  # fmt: skip
    z = kernel.causal_conv1d_update(x[0], twin, w)
    assert torch.equal(y[0], z) and torch.equal(state, twin)


def test_backward_of_more_sequences_than_a_grid_dimension(kernel, device):
    """Past 65535 sequences of one row: dx is the last tap's share, states get the others'."""
    N, D = 70_001, 16
    x, dy = (torch.randn(1, N, D, device=device) for _ in range(2))
    w = torch.randn(D, 4, device=device)
    state = torch.randn(N, D, 4, device=device, requires_grad=True)
    cu = torch.arange(N + 1, device=device)
    a = x.clone().requires_grad_()
    y = kernel.causal_conv1d(a, w, cu_seqlens=cu, initial_state=state)
    dx, dstate = torch.autograd.grad(y, (a, state), dy)
    torch.testing.assert_close(dx, dy * w[:, 3], rtol=1e-6, atol=0)
    expected = torch.nn.functional.pad(dy[0, :, :, None] * w[:, :3], (1, 0))
    torch.testing.assert_close(dstate, expected, rtol=1e-6, atol=0)


def test_ten_thousand_runs_agree_bitwise(kernel, device):
    x = torch.randn(2, 200, 512, device=device).bfloat16()
    w = torch.randn(512, 4, device=device).bfloat16()
    state = torch.randn(2, 512, 4, device=device).bfloat16()
    expected = kernel.causal_conv1d(x, w, activation="silu", initial_state=state)
    out = torch.empty_like(x)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(10_000):
        kernel.causal_conv1d(x, w, activation="silu", initial_state=state, out=out)
        wrong += (out != expected).any()
    assert wrong.item() == 0
