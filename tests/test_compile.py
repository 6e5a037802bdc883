"""torch.compile, torch.export, opcheck, and what the schemas say is mutated."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from cases import offsets


def fwd_args(device, **changes):
    args = {
        "x": torch.randn(2, 9, 16, device=device),
        "weight": torch.randn(16, 4, device=device),
        "bias": None,
        "initial_state": None,
        "cu_seqlens": None,
        "seq_idx": None,
        "state_indices": None,
        "has_initial_state": None,
        "out": None,
        "final_state": None,
    }
    args |= {k: v for k, v in changes.items()}
    if args["out"] is None:
        args["out"] = torch.empty_like(args["x"])
    return (*args.values(), True)


OPCHECKS = ["test_schema", "test_autograd_registration", "test_faketensor",
            "test_aot_dispatch_dynamic"]  # fmt: skip


def test_opcheck_fwd(kernel, device):
    op = kernel.calls.fwd
    cu = offsets([4, 5], device)
    opcheck(op, fwd_args(device), test_utils=OPCHECKS)
    opcheck(op, fwd_args(
        device, bias=torch.randn(16, device=device), x=torch.randn(2, 16, 9, device=device).mT,
        initial_state=torch.randn(2, 16, 4, device=device),
        final_state=torch.empty(2, 16, 4, device=device),
    ), test_utils=OPCHECKS)  # fmt: skip
    opcheck(op, fwd_args(
        device, x=torch.randn(1, 9, 16, device=device), cu_seqlens=cu,
        initial_state=torch.randn(6, 16, 3, device=device),
        final_state=torch.empty(6, 16, 3, device=device),
        state_indices=torch.tensor([3, 0], device=device, dtype=torch.int32),
        has_initial_state=torch.tensor([True, False], device=device),
    ), test_utils=OPCHECKS)  # fmt: skip


@pytest.mark.parametrize("wanted", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("packing", ["dense", "cu_seqlens", "seq_idx"])
def test_opcheck_of_training(kernel, device, wanted, packing):
    """Both ops, with inputs that require gradients, and every subset of those that are written."""
    leaves = [torch.randn(s, device=device, requires_grad=bool(need)) for s, need in
              zip([(1, 9, 16), (16, 4), (16,), (1, 16, 4)], wanted, strict=True)]  # fmt: skip
    x, weight, bias, initial = leaves
    cu = offsets([9], device) if packing == "cu_seqlens" else None
    ids = torch.arange(9, device=device)[None] // 4 if packing == "seq_idx" else None
    final = torch.empty(1, 16, 6, device=device)
    opcheck(kernel.calls.fwd, (x, weight, bias, initial, cu, ids, None, None,
                               torch.empty(1, 9, 16, device=device), final, True),
            test_utils=OPCHECKS)  # fmt: skip
    made = [torch.empty(t.shape, device=device) if t.requires_grad else None for t in leaves]
    dy = torch.randn(1, device=device).expand(1, 9, 16)
    opcheck(kernel.calls.bwd, (x, dy, weight, bias, initial, final, cu, ids, *made, True),
            test_utils=OPCHECKS)  # fmt: skip


def test_opcheck_update_and_states(kernel, device):
    x, state = torch.randn(3, 16, device=device), torch.randn(5, 16, 6, device=device)
    w, out = torch.randn(16, 4, device=device), torch.empty(3, 16, device=device)
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    accepted = torch.tensor([1, 0, 2], dtype=torch.int32, device=device)
    update = kernel.calls.update
    opcheck(update, (x, state, w, None, None, slots, None, accepted, out, True),
            test_utils=OPCHECKS)  # fmt: skip
    opcheck(update, (x, state[:3].clone(), w, None, accepted, None, None, None, out, True),
            test_utils=OPCHECKS)  # fmt: skip
    opcheck(
        kernel.calls.states,
        (x, offsets([1, 2], device), torch.empty(2, 16, 4, device=device)), test_utils=OPCHECKS,
    )  # fmt: skip


def test_schemas_mark_what_is_written(kernel):
    written = {}
    for name in ("fwd", "bwd", "update", "states"):
        schema = getattr(kernel.calls, name)._schema
        written[name] = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == {
        "fwd": {"out", "final_state"},
        "bwd": {"dx", "dweight", "dbias", "dinitial_state"},
        "update": {"conv_state", "out"},
        "states": {"final_state"},
    }


@pytest.fixture
def compiled():
    """Compiles whole functions, counting how often."""
    torch._dynamo.reset()
    graphs = []

    def counting(gm, inputs):
        from torch._inductor.compile_fx import compile_fx

        graphs.append(gm)
        return compile_fx(gm, inputs)

    def compile(f):
        return torch.compile(f, backend=counting, fullgraph=True, dynamic=True)

    compile.graphs = graphs
    yield compile
    torch._dynamo.reset()


def test_compile_prefill_and_decode_without_recompiles(kernel, device, compiled):
    w = torch.randn(32, 4, device=device)

    def step(x, state, token):
        y = kernel.causal_conv1d(
            x * 2, w, activation="silu", initial_state=state, final_state_out=state
        )
        z = kernel.causal_conv1d_update(token, state, w, activation="silu")
        return y + 1, z

    run = compiled(step)
    for T in (5, 9, 17, 64):
        x, token = torch.randn(2, T, 32, device=device), torch.randn(2, 32, device=device)
        a, b = (torch.ones(2, 32, 4, device=device) for _ in range(2))
        for got, expected in zip(run(x, a, token), step(x, b, token), strict=False):
            assert torch.equal(got, expected)
        assert torch.equal(a, b)
    assert len(compiled.graphs) == 1


def test_compile_packed(kernel, device, compiled):
    w = torch.randn(32, 4, device=device)

    def packed(x, cu):
        return kernel.causal_conv1d(x, w, cu_seqlens=cu, return_final_state=True)

    run = compiled(packed)
    for lengths in ([4, 5], [7, 9], [1, 30]):
        x, cu = torch.randn(1, sum(lengths), 32, device=device), offsets(lengths, device)
        for got, expected in zip(run(x, cu), packed(x, cu), strict=False):
            assert torch.equal(got, expected)
    assert len(compiled.graphs) == 1


def test_compile_drop_in_and_layers(kernel, device, compiled):
    """Channels before time, as models call it, with seq_idx, and decode of several tokens."""
    w, b = torch.randn(32, 4, device=device), torch.randn(32, device=device)
    fn, update = kernel.layers.causal_conv1d_fn(), kernel.layers.causal_conv1d_update()

    def run(x, ids, state):
        y, final = kernel.causal_conv1d_fn(x, w, b, return_final_states=True, activation="silu")
        z = fn(x, w, b, activation="silu", seq_idx=ids)
        return y, final, z, update(x, state, w, b, "silu")

    step = compiled(run)
    for T in (5, 7, 9, 33):  # 4 would be one symbol with W and L
        x = torch.randn(2, T, 32, device=device).transpose(1, 2)
        ids = torch.arange(T, device=device).expand(2, T) // 3
        a, c = (torch.ones(2, 32, 4, device=device) for _ in range(2))
        for got, expected in zip(step(x, ids, a), run(x, ids, c), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(a, c)
    assert len(compiled.graphs) == 1


def trained(run, inputs, *args):
    """Results and gradients of a scalar loss."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    outputs = run(*inputs, *args)
    loss = sum((y * y).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs)]


PACKINGS = ("dense", "cu_seqlens", "seq_idx")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compile_training_without_recompiles(kernel, device, compiled, packing, checkpointed):
    """A whole step: states in and out, gradients of every input, one graph whatever T is."""

    def block(x, weight, bias, initial, boundaries):
        given = {packing: boundaries} if packing != "dense" else {}
        y, final = kernel.causal_conv1d(
            x * 2, weight, bias, activation="silu", initial_state=initial,
            return_final_state=True, **given,
        )  # fmt: skip
        return y + 1, final

    def step(*args):
        return checkpoint(block, *args, use_reentrant=False) if checkpointed else block(*args)

    run = compiled(step)
    N = 3 if packing == "cu_seqlens" else 1
    for T in (5, 9, 17, 64):
        boundaries = {
            "dense": None,
            "cu_seqlens": offsets([2, 0, T - 2], device),
            "seq_idx": torch.arange(T, device=device)[None] // 3,
        }[packing]
        inputs = [torch.randn(s, device=device) for s in
                  ((1, T, 32), (32, 4), (32,), (N, 32, 4))]  # fmt: skip
        expected = trained(block, inputs, boundaries)
        for got, exact in zip(trained(run, inputs, boundaries), expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("used", ["y", "final"])
def test_compile_training_of_one_result(kernel, device, compiled, used):
    """The other one has no gradient."""

    def f(x, weight):
        y, final = kernel.causal_conv1d(x, weight, activation="silu", return_final_state=True)
        return (y,) if used == "y" else (final,)

    run = compiled(f)
    for T in (5, 9):
        inputs = [torch.randn(2, T, 32, device=device), torch.randn(32, 4, device=device)]
        expected = trained(f, inputs)
        for got, exact in zip(trained(run, inputs), expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)
    assert len(compiled.graphs) == 1


def test_compile_training_of_weights_alone(kernel, device, compiled):
    """x is data: the final state leaves the graph without a gradient."""
    x = torch.randn(2, 9, 32, device=device)

    def f(weight):
        y, final = kernel.causal_conv1d(x, weight, activation="silu", return_final_state=True)
        return y, final * 2

    weight = torch.randn(32, 4, device=device)
    for got, exact in zip(trained(compiled(f), [weight]), trained(f, [weight]), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)
        assert got.requires_grad == exact.requires_grad


def test_compile_training_of_drop_in_and_layer(kernel, device, compiled):
    """Channels before time, frozen weight, several batch rows under one set of offsets."""
    fn = kernel.layers.causal_conv1d_fn()
    w, b = torch.randn(32, 4, device=device), torch.randn(32, device=device)

    def f(x, weight, cu):
        y, final = kernel.causal_conv1d_fn(x, w, b, return_final_states=True, activation="silu")
        z = fn(x, weight, activation="silu", seq_idx=None)
        rows = kernel.causal_conv1d(x.transpose(1, 2).contiguous(), weight, cu_seqlens=cu)
        return y, final, z, rows

    run = compiled(f)
    for T in (5, 7, 33):
        inputs = [torch.randn(2, T, 32, device=device).transpose(1, 2),
                  torch.randn(32, 4, device=device)]  # fmt: skip
        cu = offsets([T + 1, T - 1], device)
        expected = trained(f, inputs, cu)
        for got, exact in zip(trained(run, inputs, cu), expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-6)
    assert len(compiled.graphs) == 1


def test_compile_slots_with_a_dynamic_batch(kernel, device, compiled):
    w = torch.randn(32, 4, device=device)

    def step(x, pool, slots):
        return kernel.causal_conv1d_update(x, pool, w, conv_state_indices=slots) * 2

    run = compiled(step)
    pools = [torch.ones(20, 32, 4, device=device) for _ in range(2)]
    for n in (3, 5, 12):
        x, slots = torch.randn(n, 32, device=device), torch.arange(n, device=device) - 1
        assert torch.equal(run(x, pools[0], slots), step(x, pools[1], slots))
        assert torch.equal(*pools)
    assert len(compiled.graphs) == 1


def test_compile_says_what_is_wrong(kernel, device, compiled):
    run = compiled(lambda x, w: kernel.causal_conv1d(x, w))
    with pytest.raises(Exception, match=r"weight must have shape \[D, W\] with D="):
        run(torch.ones(1, 4, 8, device=device), torch.ones(7, 4, device=device))
    state = torch.ones(1, 8, 4, device=device)
    update = compiled(lambda x, w: kernel.causal_conv1d_update(x, state, w))
    with pytest.raises(Exception, match="weight must not require a gradient"):
        update(torch.ones(1, 8, device=device), torch.ones(8, 4, device=device, requires_grad=True))
    pool = compiled(lambda x, w: kernel.causal_conv1d(x, w, final_state_out=state))
    with pytest.raises(Exception, match="final_state_out must not be given where a gradient"):
        pool(
            torch.ones(1, 4, 8, device=device),
            torch.ones(8, 4, device=device, requires_grad=True),
        )


def test_export_decode_mutates_its_state(kernel, device):
    class Decode(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randn(32, 4, device=device))
            self.register_buffer("state", torch.ones(2, 32, 4, device=device))

        def forward(self, x):
            return kernel.causal_conv1d_update(x, self.state, self.weight, activation="silu")

    module = Decode()
    twin = copy.deepcopy(module)  # an exported program keeps the module's own buffers
    program = torch.export.export(twin, (torch.randn(2, 32, device=device),)).module()
    for _ in range(3):
        x = torch.randn(2, 32, device=device)
        assert torch.equal(program(x), module(x))
    assert torch.equal(program.state, module.state)


def test_export_keeps_the_op(kernel, device):
    w = torch.randn(32, 4, device=device)

    class Conv(torch.nn.Module):
        def forward(self, x):
            return kernel.causal_conv1d(x, w, activation="silu")

    x = torch.randn(1, 8, 32, device=device)
    program = torch.export.export(Conv(), (x,), dynamic_shapes={"x": {1: torch.export.Dim("T")}})
    assert "fwd" in str(program.graph)
    longer = torch.randn(1, 21, 32, device=device)
    assert torch.equal(program.module()(longer), Conv()(longer))


def test_export_of_a_module_with_parameters(kernel, device):
    """The program holds the forward op and gives its bits."""

    class Conv(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 4, device=device))

        def forward(self, x):
            return kernel.causal_conv1d(x, self.weight, activation="silu")

    module, x = Conv(), torch.randn(1, 8, 32, device=device)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {1: torch.export.Dim("T")}})
    longer = torch.randn(1, 21, 32, device=device)
    assert torch.equal(program.module()(longer), module(longer))


def test_fakes_refuse_like_the_real_ops(kernel, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x, w = torch.empty(1, 4, 8, device=device), torch.empty(7, 4, device=device)
        with pytest.raises(ValueError, match="weight must have shape"):
            kernel.causal_conv1d(x, w)
        y = kernel.causal_conv1d(x.mT.contiguous().mT, torch.empty(8, 4, device=device))
        assert y.stride() == (32, 1, 4) and y.fake_mode is mode
