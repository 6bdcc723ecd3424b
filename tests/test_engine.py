"""The two engines compute the same function, whatever the tokens, the grid, the tile and the temperature."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import local_model
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec import separable, separable_carriers, separable_paper
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.engine import decode_grid, tile_within
from coanerv_codec.errors import CoanervError, FormatError
from coanerv_codec.model import AnyDecoder
from coanerv_codec.positions import cell_positions, frame_times

PAPER = replace(PRESETS["tiny-paper"], grid=(4, 3, 2))
CARRIERS = PRESETS["tiny"]
BOTH = pytest.mark.parametrize("config", [PAPER, CARRIERS], ids=["paper", "carriers"])


def local_decoder(config: Config, seed: int = 0) -> AnyDecoder:
    """A decoder at its local start, but with all of its parts at work."""
    decoder = local_model(config, seed).decoder.requires_grad_(False)
    if isinstance(decoder, CarrierDecoder):
        generator = torch.Generator().manual_seed(seed)
        for layer, gain in ((decoder.mixed_value, 0.03), (decoder.mlp[-1], 0.1)):
            layer.weight += gain * torch.randn(layer.weight.shape, generator=generator)
        for key in (decoder.key_x, decoder.key_y):
            key += 0.03 * torch.randn(key.shape, generator=generator)
        decoder.linear.bias += 0.1
        for layer in decoder.mlp:
            layer.bias += 0.1 * torch.randn(layer.bias.shape, generator=generator)
    return decoder


def random_tokens(decoder: AnyDecoder, cells: int = 1, gain: float | None = None) -> torch.Tensor:
    gain = gain or (0.1 if isinstance(decoder, CarrierDecoder) else 0.5)  # about what encoders give
    return gain * torch.randn(
        cells, decoder.config.tokens, decoder.config.token_dim, generator=torch.Generator().manual_seed(1)
    )


def line(n: int, cells: int = 1) -> torch.Tensor:
    return (torch.arange(n) / max(n - 1, 1)).expand(cells, -1)


def exact_pixels(decoder: AnyDecoder, tokens: torch.Tensor, *grid: torch.Tensor) -> torch.Tensor:
    """The reference engine in float64."""
    exact = decode_grid(decoder.double(), tokens.double(), *(u.double() for u in grid), engine="reference")
    decoder.float()
    return exact


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def count_reference_blocks(monkeypatch) -> list[int]:
    """Record how many queries the separable engine hands to the reference engine."""
    calls = []
    original = separable.decode_block

    def counted(decoder, tokens, x, y, t):
        calls.append(len(x) * len(y) * len(t))
        return original(decoder, tokens, x, y, t)

    monkeypatch.setattr(separable, "decode_block", counted)
    return calls


@BOTH
def test_reference_is_the_model_itself(config):
    decoder = local_decoder(config)
    tokens = random_tokens(decoder)
    expected = decoder.at(tokens, cell_positions(7)[None], frame_times(8)).view(1, 8, 7, 7, 3)
    pixels = decode_grid(decoder, tokens, line(7), line(7), torch.arange(8) / 8, engine="reference", tile=3)
    assert difference(pixels, expected) <= 1e-5


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("preset", ["tiny", "tiny-paper", "base"])
def test_separable_equals_reference(preset, depth):
    decoder = local_decoder(replace(PRESETS[preset], mlp_depth=depth))
    if preset == "tiny-paper":
        torch.nn.init.normal_(decoder.out.bias)
    tokens = random_tokens(decoder, cells=2)
    grid = torch.rand(2, 37), torch.rand(2, 29), torch.rand(11)
    fast, slow = (decode_grid(decoder, tokens, *grid, engine=e) for e in ("separable", "reference"))
    assert fast.shape == (2, 11, 29, 37, 3)
    assert fast.dtype == torch.float32
    assert_as_exact(fast, slow, exact_pixels(decoder, tokens, *grid))


def assert_as_exact(fast: torch.Tensor, slow: torch.Tensor, exact: torch.Tensor) -> None:
    """No further from the truth than 1e-5, or than the reference is in float32, which knows a logit of 100 to 1e-5."""
    assert difference(fast.double(), exact) <= max(1e-5, 1.5 * difference(slow.double(), exact))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 10)),
    tile=st.sampled_from([1, 2, 5, 16, 64]),
    gain=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
)
@BOTH
def test_any_tokens_any_grid(config, seed, sizes, tile, gain):
    decoder = local_decoder(config)
    generator = torch.Generator().manual_seed(seed)
    tokens = gain * torch.randn(1, config.tokens, config.token_dim, generator=generator)
    w, h, frames = sizes
    x, y = torch.rand(1, w, generator=generator), torch.rand(1, h, generator=generator)
    t = torch.rand(frames, generator=generator)
    fast = decode_grid(decoder, tokens, x, y, t, tile=tile)
    exact = exact_pixels(decoder, tokens, x, y, t)
    # Large tokens give large logits and pixels; then both engines round at that size.
    slow = decode_grid(decoder, tokens, x, y, t, engine="reference", tile=tile)
    rounding = max(1e-5 * max(1.0, gain**2), 1.5 * difference(slow.double(), exact))
    assert difference(fast.double(), exact) <= rounding


@pytest.mark.parametrize("engine", ["separable", "reference"])
@pytest.mark.parametrize("config", [PAPER, PRESETS["base"]], ids=["paper", "carriers"])
def test_tile_changes_nothing(engine, config):
    decoder = local_decoder(config)
    tokens = random_tokens(decoder)
    pictures = [
        decode_grid(decoder, tokens, line(70), line(50), line(2)[0], engine=engine, tile=s) for s in (16, 64, 256)
    ]
    assert max(difference(p, pictures[0]) for p in pictures[1:]) <= 1e-5


@BOTH
def test_a_crop_is_a_part_of_the_picture(config):
    decoder = local_decoder(config)
    tokens = random_tokens(decoder)
    x, y, t = line(64), line(48), torch.arange(8) / 8
    whole = decode_grid(decoder, tokens, x, y, t)
    part = decode_grid(decoder, tokens, x[:, 20:33], y[:, 7:18], t[3:5])
    assert difference(part, whole[:, 3:5, 7:18, 20:33]) <= 1e-5


@pytest.mark.parametrize(("temperature", "share"), [(0.03, 0.5), (1e-3, 1.0), (1e-4, 1.0)])
def test_sharp_attention_falls_back_and_stays_exact(temperature, share, monkeypatch):
    """With a tiny temperature a pixel's best logit lies hundreds of nats under the bound, in large parts and in small."""
    calls = count_reference_blocks(monkeypatch)
    decoder = local_decoder(PAPER)
    decoder.config = replace(PAPER, temperature=temperature)
    tokens = random_tokens(decoder)
    grid = line(32), line(32), torch.arange(8) / 8
    fast = decode_grid(decoder, tokens, *grid)
    assert share * 32 * 32 * 8 <= sum(calls)
    if share < 1:
        assert sum(calls) < 32 * 32 * 8, "smaller parts should have rescued some pixels"
    # float32 knows a logit of 1e4 to 1e-3 only, and so does every engine that works in it.
    assert_as_exact(fast, decode_grid(decoder, tokens, *grid, engine="reference"), exact_pixels(decoder, tokens, *grid))


@pytest.mark.parametrize("temperature", [1.0, 1e-3, 1e-5])
def test_carriers_never_fall_back_however_sharp_attention_is(temperature, monkeypatch):
    calls = count_reference_blocks(monkeypatch)
    decoder = local_decoder(CARRIERS)
    decoder.config = replace(CARRIERS, temperature=temperature)
    tokens = random_tokens(decoder)
    grid = line(32), line(32), torch.arange(8) / 8
    fast = decode_grid(decoder, tokens, *grid)
    assert not calls
    assert_as_exact(fast, decode_grid(decoder, tokens, *grid, engine="reference"), exact_pixels(decoder, tokens, *grid))


def test_reference_rescues_every_pixel(monkeypatch):
    """A floor that nothing can pass sends all queries, each once, to the reference engine."""
    calls = count_reference_blocks(monkeypatch)
    monkeypatch.setattr(separable_paper, "FLOOR", math.inf)
    decoder = local_decoder(PAPER)
    tokens = random_tokens(decoder, cells=2)
    x, y, t = line(21, 2), line(17, 2), line(5)[0]
    fast = decode_grid(decoder, tokens, x, y, t)
    assert sum(calls) == 2 * 21 * 17 * 5
    assert max(calls) <= separable.SMALLEST
    assert difference(fast, decode_grid(decoder, tokens, x, y, t, engine="reference")) <= 1e-5


@BOTH
@pytest.mark.parametrize("engine", ["separable", "reference"])
def test_tokens_beyond_float_are_refused(engine, config):
    decoder = local_decoder(config)
    tokens = random_tokens(decoder, gain=1e38)
    with pytest.raises(FormatError, match="damaged"):
        decode_grid(decoder, tokens, line(9), line(9), line(2)[0], engine=engine)


def test_lal_is_left_to_the_reference():
    decoder = local_decoder(replace(PAPER, retrieval="lal"))
    tokens = random_tokens(decoder)
    x, y, t = line(12), line(10), line(3)[0]
    assert torch.equal(*(decode_grid(decoder, tokens, x, y, t, engine=e) for e in ("separable", "reference")))


@BOTH
def test_bf16_stays_within_a_code_value(config):
    decoder = local_decoder(config)
    tokens = random_tokens(decoder, gain=0.02 if config.carriers else None)  # a picture within [0,1]
    x, y, t = line(16), line(16), torch.arange(4) / 4
    exact, rough = (decode_grid(decoder, tokens, x, y, t, precision=p) for p in ("fp32", "bf16"))
    assert 0 < difference(exact, rough) <= 1 / 255


@BOTH
def test_work_is_bounded_by_the_tile(config, monkeypatch):
    """No matrix product with the tokens makes more than tile^2 pixels, however large the grid."""
    widest = []
    decoder = local_decoder(config)
    rows = config.mlp_hidden + 1  # of what a product with the tokens makes, for one frame
    if config.carriers:
        rows = int(decoder.harmonics.any(1).sum())

    def watch(name):
        original = getattr(torch, name)

        def watched(a, b, out):
            if len(out) == rows:
                widest.append(out[0].numel())
            return original(a, b, out=out)

        monkeypatch.setattr(torch, name, watched)

    watch("mm")
    watch("bmm")
    decode_grid(decoder, random_tokens(decoder), line(300), line(200), line(1)[0], tile=8)
    assert widest
    assert max(widest) <= 64


@pytest.mark.parametrize("wrong", [{"engine": "fast"}, {"precision": "auto"}])
def test_unknown_engines_and_precisions_are_refused(wrong):
    decoder = local_decoder(PAPER)
    with pytest.raises(ValueError, match="no engine"):
        decode_grid(decoder, random_tokens(decoder), line(2), line(2), line(2)[0], **wrong)


@pytest.mark.parametrize("preset", ["base", "paper-s"])
@pytest.mark.parametrize("engine", ["separable", "reference"])
def test_largest_tile_within_a_memory_budget(engine, preset):
    config = PRESETS[preset]
    tiles = [tile_within(config, engine, budget) for budget in (10**6, 10**7, 10**8)]
    assert tiles == sorted(tiles)
    assert tiles[0] < tiles[2] <= 4096
    with pytest.raises(CoanervError, match="working memory"):
        tile_within(config, engine, 100)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_passes_of_a_gpu_compute_the_same(depth, precision, monkeypatch):
    """Those of the paper's decoder; with carriers a GPU runs the same code as a CPU."""
    decoder = local_decoder(replace(PAPER, mlp_depth=depth))
    tokens = random_tokens(decoder)
    grid = torch.rand(1, 13), torch.rand(1, 11), torch.arange(3) / 8
    expected = decode_grid(decoder, tokens, *grid, tile=8)
    used = []
    original = separable_paper._decode_passes_batched
    monkeypatch.setattr(separable_paper, "_decode_passes", lambda *some: used.append(1) or original(*some))
    pixels = decode_grid(decoder, tokens, *grid, tile=8, precision=precision)
    assert used
    assert difference(pixels, expected) <= (1e-5 if precision == "fp32" else 1 / 255)


# --- rows of tokens that a pass leaves out ------------------------------------------------------------------------


@pytest.mark.parametrize(("gain", "least", "most"), [(1.0, 0.2, 0.9), (1e-3, 1.0, 1.0), (1e4, 1 / 12, 0.2)])
def test_a_pass_sums_the_rows_of_tokens_that_reach_it(gain, least, most):
    decoder = local_decoder(PRESETS["base"])
    decoder.key_y.mul_(gain)
    along_y = separable_carriers.attention(decoder, 1, line(128)[0])
    passes = separable_carriers.rows_needed(along_y, 4)
    assert len(passes) == 32
    assert least <= sum(last - first for first, last in passes) / (12 * 32) <= most
    for i, (first, last) in enumerate(passes):
        assert 0 <= first < last <= 12
        left_out = torch.cat([along_y[4 * i : 4 * i + 4, :, :first], along_y[4 * i : 4 * i + 4, :, last:]], dim=2)
        assert not left_out.any()
        assert along_y[4 * i : 4 * i + 4, :, first].any()
        assert along_y[4 * i : 4 * i + 4, :, last - 1].any()


@pytest.mark.parametrize("times", [1, 2, 3, 9])
@pytest.mark.parametrize("harmonics", [(0, 0, 0), (1, 0, 0), (0, 1, 2), None], ids=str)
def test_any_waves_and_numbers_of_frames(harmonics, times):
    """Also where all carriers are flat or none is, where none stands still, and where few frames share a grid."""
    decoder = local_decoder(CARRIERS)
    if harmonics:
        decoder.harmonics[:] = torch.tensor(harmonics).to(decoder.harmonics)
    tokens = random_tokens(decoder, gain=0.02)
    grid = line(13), line(6), torch.rand(times)
    fast, slow = (decode_grid(decoder, tokens, *grid, engine=e) for e in ("separable", "reference"))
    assert difference(fast, slow) <= 1e-5
    assert difference(decode_grid(decoder, tokens, *grid, precision="bf16"), slow) <= 1 / 255


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), far=st.sampled_from([1.0, 1e2, 1e4]))
def test_what_is_left_out_is_lost_in_rounding(seed, far):
    """Also where some tokens hold ten thousand times what the others do."""
    decoder = local_decoder(replace(CARRIERS, grid=(4, 6, 1)), seed % 7)
    generator = torch.Generator().manual_seed(seed)
    tokens = 0.1 * torch.randn(1, decoder.config.tokens, decoder.config.token_dim, generator=generator)
    tokens[0, torch.randint(len(tokens[0]), (3,), generator=generator)] *= far
    grid = [torch.rand(1, 16, generator=generator).double() for _ in range(2)] + [torch.rand(3).double()]
    fast, slow = (decode_grid(decoder.double(), tokens.double(), *grid, engine=e) for e in ("separable", "reference"))
    decoder.float()
    assert difference(fast, slow) <= 1e-7 * max(1.0, far)
