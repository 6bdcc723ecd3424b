"""The two engines compute the same function, whatever the tokens, the grid, the tile and the temperature."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec import separable
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.engine import decode_grid, tile_within
from coanerv_codec.errors import CoanervError, FormatError
from coanerv_codec.local_start import start_local
from coanerv_codec.model import CoANeRV, Decoder, pixel_grid

SMALL = replace(PRESETS["tiny"], grid=(4, 3, 2))


def local_decoder(config: Config = SMALL, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = CoANeRV(config)
    start_local(model, torch.Generator().manual_seed(seed))
    return model.decoder.requires_grad_(False)


def random_tokens(decoder: Decoder, cells: int = 1, gain: float = 0.5) -> torch.Tensor:
    return gain * torch.randn(
        cells, decoder.config.tokens, decoder.config.token_dim, generator=torch.Generator().manual_seed(1)
    )


def line(n: int, cells: int = 1) -> torch.Tensor:
    return (torch.arange(n) / max(n - 1, 1)).expand(cells, -1)


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


def test_reference_is_the_model_itself():
    decoder = local_decoder()
    tokens = random_tokens(decoder)
    expected = decoder(tokens, pixel_grid(8, 5, 7)).view(1, 8, 5, 7, 3)
    pixels = decode_grid(decoder, tokens, line(7), line(5), torch.arange(8) / 8, engine="reference", tile=3)
    assert difference(pixels, expected) <= 1e-6


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("preset", ["tiny", "base"])
def test_separable_equals_reference(preset, skip, depth):
    decoder = local_decoder(replace(PRESETS[preset], gamma_skip=skip, mlp_depth=depth))
    torch.nn.init.normal_(decoder.out.bias)
    tokens = random_tokens(decoder, cells=2)
    x, y, t = torch.rand(2, 37), torch.rand(2, 29), torch.rand(11)
    fast, slow = (decode_grid(decoder, tokens, x, y, t, engine=e) for e in ("separable", "reference"))
    assert fast.shape == (2, 11, 29, 37, 3)
    assert fast.dtype == torch.float32
    assert difference(fast, slow) <= 1e-5


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 10)),
    tile=st.sampled_from([1, 2, 5, 16, 64]),
    gain=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
)
def test_any_tokens_any_grid(seed, sizes, tile, gain):
    decoder = local_decoder()
    generator = torch.Generator().manual_seed(seed)
    tokens = gain * torch.randn(1, SMALL.tokens, SMALL.token_dim, generator=generator)
    w, h, frames = sizes
    x, y = torch.rand(1, w, generator=generator), torch.rand(1, h, generator=generator)
    t = torch.rand(frames, generator=generator)
    fast = decode_grid(decoder, tokens, x, y, t, tile=tile)
    # Large tokens give large logits and pixels; then both engines round at that size.
    exact = decode_grid(decoder.double(), tokens.double(), x.double(), y.double(), t.double(), engine="reference")
    decoder.float()
    assert difference(fast.double(), exact) <= 1e-5 * max(1.0, gain**2)


@pytest.mark.parametrize("engine", ["separable", "reference"])
def test_tile_changes_nothing(engine):
    decoder = local_decoder(PRESETS["base"])
    tokens = random_tokens(decoder)
    pictures = [
        decode_grid(decoder, tokens, line(70), line(50), line(2)[0], engine=engine, tile=s) for s in (16, 64, 256)
    ]
    assert max(difference(p, pictures[0]) for p in pictures[1:]) <= 1e-5


def test_a_crop_is_a_part_of_the_picture():
    decoder = local_decoder()
    tokens = random_tokens(decoder)
    x, y, t = line(64), line(48), torch.arange(8) / 8
    whole = decode_grid(decoder, tokens, x, y, t)
    part = decode_grid(decoder, tokens, x[:, 20:33], y[:, 7:18], t[3:5])
    assert difference(part, whole[:, 3:5, 7:18, 20:33]) <= 1e-5


@pytest.mark.parametrize(("temperature", "share"), [(0.03, 0.5), (1e-3, 1.0), (1e-4, 1.0)])
def test_sharp_attention_falls_back_and_stays_exact(temperature, share, monkeypatch):
    """With a tiny temperature a pixel's best logit lies hundreds of nats under the bound, in large parts and in small."""
    calls = count_reference_blocks(monkeypatch)
    decoder = local_decoder()
    decoder.config = replace(SMALL, temperature=temperature)
    tokens = random_tokens(decoder)
    x, y, t = line(32), line(32), torch.arange(8) / 8
    fast = decode_grid(decoder, tokens, x, y, t)
    assert share * 32 * 32 * 8 <= sum(calls)
    if share < 1:
        assert sum(calls) < 32 * 32 * 8, "smaller parts should have rescued some pixels"
    slow = decode_grid(decoder, tokens, x, y, t, engine="reference")
    exact = decode_grid(decoder.double(), tokens.double(), x.double(), y.double(), t.double(), engine="reference")
    # float32 knows a logit of 1e4 to 1e-3 only, and so does every engine that works in it.
    assert difference(fast.double(), exact) <= max(1e-5, 1.5 * difference(slow.double(), exact))


def test_reference_rescues_every_pixel(monkeypatch):
    """A floor that nothing can pass sends all queries, each once, to the reference engine."""
    calls = count_reference_blocks(monkeypatch)
    monkeypatch.setattr(separable, "FLOOR", math.inf)
    decoder = local_decoder()
    tokens = random_tokens(decoder, cells=2)
    x, y, t = line(21, 2), line(17, 2), line(5)[0]
    fast = decode_grid(decoder, tokens, x, y, t)
    assert sum(calls) == 2 * 21 * 17 * 5
    assert max(calls) <= separable.SMALLEST
    assert difference(fast, decode_grid(decoder, tokens, x, y, t, engine="reference")) <= 1e-6


def test_trained_sharpness_needs_no_fallback(monkeypatch):
    calls = count_reference_blocks(monkeypatch)
    decoder = local_decoder(PRESETS["base"])
    decode_grid(decoder, random_tokens(decoder), line(32), line(32), torch.arange(8) / 8)
    assert not calls


@pytest.mark.parametrize("engine", ["separable", "reference"])
def test_tokens_beyond_float_are_refused(engine):
    decoder = local_decoder()
    tokens = random_tokens(decoder, gain=1e38)
    with pytest.raises(FormatError, match="damaged"):
        decode_grid(decoder, tokens, line(9), line(9), line(2)[0], engine=engine)


def test_lal_is_left_to_the_reference():
    decoder = local_decoder(replace(SMALL, retrieval="lal"))
    tokens = random_tokens(decoder)
    x, y, t = line(12), line(10), line(3)[0]
    assert torch.equal(*(decode_grid(decoder, tokens, x, y, t, engine=e) for e in ("separable", "reference")))


@pytest.mark.parametrize("skip", [False, True])
def test_bf16_stays_within_a_code_value(skip):
    decoder = local_decoder(replace(SMALL, gamma_skip=skip))
    tokens = random_tokens(decoder)
    x, y, t = line(16), line(16), torch.arange(4) / 4
    exact, rough = (decode_grid(decoder, tokens, x, y, t, precision=p) for p in ("fp32", "bf16"))
    assert 0 < difference(exact, rough) <= 1 / 255


def test_work_is_bounded_by_the_tile(monkeypatch):
    """No matrix product sees more than tile^2 pixels, however large the grid."""
    widest = []
    original = torch.mm

    def watched(a, b, out):
        widest.append(b.shape[1])
        return original(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    decoder = local_decoder()
    decode_grid(decoder, random_tokens(decoder), line(300), line(200), line(1)[0], tile=8)
    assert max(widest) <= 64
    assert sum(widest) == 300 * 200 * SMALL.decoder_heads


@pytest.mark.parametrize("wrong", [{"engine": "fast"}, {"precision": "auto"}])
def test_unknown_engines_and_precisions_are_refused(wrong):
    decoder = local_decoder()
    with pytest.raises(ValueError, match="no engine"):
        decode_grid(decoder, random_tokens(decoder), line(2), line(2), line(2)[0], **wrong)


@pytest.mark.parametrize("engine", ["separable", "reference"])
def test_largest_tile_within_a_memory_budget(engine):
    config = PRESETS["base"]
    tiles = [tile_within(config, engine, budget) for budget in (10**6, 10**7, 10**8)]
    assert tiles == sorted(tiles)
    assert tiles[0] < tiles[2] <= 4096
    with pytest.raises(CoanervError, match="working memory"):
        tile_within(config, engine, 100)


@pytest.mark.parametrize("config", [SMALL, replace(SMALL, gamma_skip=True, mlp_depth=3)])
def test_the_passes_of_a_gpu_compute_the_same(config, monkeypatch):
    decoder = local_decoder(config)
    torch.manual_seed(1)
    tokens = torch.randn(1, config.tokens, config.token_dim)
    grid = torch.rand(1, 13), torch.rand(1, 11), torch.arange(3) / 8
    expected = decode_grid(decoder, tokens, *grid, tile=8)
    monkeypatch.setattr(separable, "_decode_passes", separable._decode_passes_batched)
    assert (decode_grid(decoder, tokens, *grid, tile=8) - expected).abs().max() <= 1e-5
