"""The model against the paper's formulas, written out once more here."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import local_model
from torch import Tensor

from coanerv_codec import local_start
from coanerv_codec.attention import Attention
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.decoder import Decoder, localized_attention
from coanerv_codec.engine import ENGINES, decode_grid
from coanerv_codec.model import CoANeRV
from coanerv_codec.positions import cell_positions, frame_times, frequency_bank

TINY, PAPER = PRESETS["tiny"], PRESETS["tiny-paper"]
both = pytest.mark.parametrize("config", [TINY, PAPER], ids=["carriers", "paper"])


def parameters(name: str) -> tuple[int, int]:
    """Parameters of a preset's encoder and decoder, counted without memory for them."""
    with torch.device("meta"):
        model = CoANeRV(PRESETS[name])
    encoder, decoder = (sum(p.numel() for p in part.parameters()) for part in (model.encoder, model.decoder))
    return encoder, decoder


def test_encoder_sizes_differ_between_frame_counts_as_in_the_papers_table():
    sizes = {frames: parameters(f"paper-s-f{frames}")[0] for frames in (4, 8, 16)}
    assert sizes == {4: 44_256_072, 8: 45_042_504, 16: 46_615_368}
    paper = {4: 45.5, 8: 46.3, 16: 47.9}
    for more, less in [(8, 4), (16, 8)]:
        assert round((sizes[more] - sizes[less]) / 1e6, 1) == round(paper[more] - paper[less], 1)
    # docs/model.md explains the constant 1.25M between the two columns; it must not depend on F.
    assert {round(paper[frames] - sizes[frames] / 1e6, 1) for frames in sizes} <= {1.2, 1.3}


def test_sizes_of_the_other_presets():
    assert parameters("paper-m")[0] == parameters("paper-s")[0] + 128 * 768
    assert parameters("paper-l")[0] == parameters("paper-s")[0] + 384 * 768
    # W_Q, W_K, W_V, W_O with its bias, two layers, and the learned base of N x 72.
    assert parameters("paper-s")[1] == 3 * 72 * 384 + (384 * 72 + 72) + (72 * 72 + 72) + (72 * 3 + 3) + 384 * 72


def test_the_size_of_base_is_the_sum_of_its_parts():
    """Written out from docs/model.md: N = 96, C = 280, 16 modes, 2 heads, a mixer of 3 blocks 192 wide."""
    block = 2 * 2 * 192 + 3 * 192 * 192 + (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192)
    mixer = (280 * 192 + 192) + (96 + 16) * 192 + 3 * block + 2 * 192
    attention = 2 * (8 + 12) * 32
    values = 280 * 2 * 280 + (192 * 2 * 280 + 2 * 280)
    pixel = (280 * 3 + 3) + (280 * 32 + 32) + (32 * 3 + 3)
    # Windows of 27 x 32 pixels in luma and 14 x 16 in chroma, three phases.
    analysis = 3 * (27 * 32 * 96 + 2 * 14 * 16 * 56) + 280 * 8
    former = 2 * (4 * 256 * 256 + 256 + (256 * 1024 + 1024) + (1024 * 256 + 256) + 2 * 512)
    rest = (96 + 16) * 256 + 512 + (256 * 280 + 280) + (280 * 256 + 256)
    gains = 16 * 68  # of each mode's channels; the same ones in both
    assert parameters("base") == (analysis + former + rest + gains, mixer + attention + values + pixel + gains)


def test_the_documented_sizes_are_those_of_the_presets():
    """The table of docs/model.md: `| preset | F | cell | N | D, L | encoder | decoder |`."""
    text = (Path(__file__).parents[1] / "docs" / "model.md").read_text()
    rows = [[v.strip() for v in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    assert {row[0].split("`")[1] for row in rows} == {n for n in PRESETS if "-f" not in n}
    for row in rows:
        name = row[0].split("`")[1]
        c = PRESETS[name]
        sizes = [f"{count / 1e6:.2f} M" for count in parameters(name)]
        assert row[1:] == [str(c.frames), str(c.cell), str(c.tokens), f"{c.width}, {c.depth}", *sizes]


# --- coordinates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paper-s-f4", "paper-s", "paper-l-f16", "base", "tiny-paper"])
def test_gamma_is_the_papers(name):
    config = PRESETS[name]
    with torch.device("meta"):
        shapes = Decoder(config)
    assert shapes.query.in_features == 72
    k_s, k_t, sigma_s, sigma_t = 16, 4, 2 * config.cell, 2 * config.frames
    decoder = Decoder(replace(PAPER, cell=config.cell, frames=config.frames))
    q = torch.tensor([[0.3, 0.7, 0.25], [1.0, 0.0, 0.875]])
    expected = []
    for x, y, t in q.double().tolist():
        row = []
        for u, sigma, k in [(x, sigma_s, k_s), (y, sigma_s, k_s), (t, sigma_t, k_t)]:
            w = [sigma ** (i / (k - 1)) for i in range(k)]
            row += [math.sin(math.pi * u * f) for f in w] + [math.cos(math.pi * u * f) for f in w]
        expected.append(row)
    gamma = decoder.gamma(q)
    assert gamma.shape == (2, 72)
    # Angles reach 512 pi in float32, whose steps are 1e-4 there.
    torch.testing.assert_close(gamma.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-4, rtol=0)
    # With carriers, attention is over space alone, an axis at a time, with the same frequencies.
    carriers = CarrierDecoder(replace(TINY, cell=config.cell, frames=config.frames))
    assert torch.equal(carriers.w_s, decoder.w_s)


def test_frequencies_run_from_one_to_sigma():
    w = frequency_bank(512.0, 16)
    assert w[0] == 1
    assert w[-1] == 512
    assert w.dtype == torch.float32
    torch.testing.assert_close(w[1:] / w[:-1], torch.full((15,), 512 ** (1 / 15)))
    assert frequency_bank(512.0, 1).tolist() == [1.0]


def test_positions_and_times_are_the_papers():
    expected = [(x / 4, y / 4) for y in range(5) for x in range(5)]
    torch.testing.assert_close(cell_positions(5), torch.tensor(expected), atol=0, rtol=1e-7)
    torch.testing.assert_close(frame_times(3), torch.tensor([0, 1 / 3, 2 / 3]), atol=0, rtol=1e-7)
    assert cell_positions(1).tolist() == [[0.0, 0.0]]
    assert frame_times(1).tolist() == [0.0]


# --- decoder ------------------------------------------------------------------------------------------------------


def written_out(decoder: Decoder, tokens: Tensor, q: Tensor) -> Tensor:
    """The decoder as the paper writes it, one head and one query set at a time: tokens [N,d], q [Q,3] -> [Q,3]."""
    c = decoder.config
    gamma, memory = decoder.gamma(q), tokens + decoder.base
    features = []
    for h in range(c.decoder_heads):
        rows = slice(h * c.decoder_head_dim, (h + 1) * c.decoder_head_dim)
        query, key, value = (
            u @ layer.weight[rows].T
            for u, layer in [(gamma, decoder.query), (memory, decoder.key), (memory, decoder.value)]
        )
        if c.retrieval == "temperature":
            logits = query @ key.T / (c.temperature * math.sqrt(c.decoder_head_dim))
            weights = logits.exp() / logits.exp().sum(1, keepdim=True)
        else:
            logits = query @ key.T / math.sqrt(c.decoder_head_dim)
            weights = logits.exp() / logits.exp().sum(1, keepdim=True)
            weights = torch.where(weights > c.lal_threshold, weights - c.lal_threshold, torch.zeros(()))
            weights = weights / weights.sum(1, keepdim=True)
        features.append(weights @ value)
    h = decoder.out(torch.cat(features, dim=1))
    h = decoder.mlp[0](h)
    for layer in decoder.mlp[1:]:
        h = layer(h * torch.sigmoid(h))
    return h + 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.1},
        {"mlp_depth": 3},
        {"mlp_depth": 5, "mlp_hidden": 40},
        {"retrieval": "lal", "lal_threshold": 0.1},
    ],
    ids=str,
)
def test_decoder_is_the_formula_written_out(changes):
    config = replace(PAPER, grid=(4, 3, 2), **changes)
    decoder = local_model(config).decoder.double()
    tokens = torch.randn(2, config.tokens, config.token_dim, dtype=torch.float64, generator=generator())
    q = torch.rand(2, 50, 3, dtype=torch.float64, generator=generator())
    expected = torch.stack([written_out(decoder, *pair) for pair in zip(tokens, q, strict=True)])
    torch.testing.assert_close(decoder(tokens, q), expected)
    # One set of coordinates for all cells is the same as repeating it.
    torch.testing.assert_close(decoder(tokens, q[0]), decoder(tokens, q[:1].expand(2, -1, -1)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_smaller_temperature_retrieves_more_sharply():
    tokens, q = torch.zeros(1, 24, 72), torch.rand(200, 3, generator=generator())
    largest = []
    for temperature in (0.1, 0.4, 1.0):
        decoder = local_model(replace(PAPER, grid=(4, 3, 2))).decoder
        query = decoder.query(decoder.gamma(q)).unflatten(-1, (2, 64)).transpose(0, 1)
        key = decoder.keys_values(tokens)[0][0]
        largest.append(torch.softmax(query @ key.mT / (temperature * 8), dim=-1).amax(-1).mean().item())
    assert largest[0] > largest[1] > largest[2]
    assert Decoder(replace(PAPER, temperature=0.25)).scale == 1 / (0.25 * 8)
    assert Decoder(replace(PAPER, temperature=0.25, retrieval="lal")).scale == 1 / 8


def test_lal_thresholds_and_renormalises():
    value = torch.eye(3)[None, None]
    key = torch.tensor([0.0, math.log(3.0), math.log(6.0)])[None, None, :, None]
    query = torch.ones(1, 1, 1, 1)
    for threshold, expected in [(0.0, [0.1, 0.3, 0.6]), (0.1, [0.0, 2 / 7, 5 / 7]), (0.3, [0.0, 0.0, 1.0])]:
        weights = localized_attention(query, key, value, 1.0, threshold).flatten()
        torch.testing.assert_close(weights, torch.tensor(expected), atol=1e-6, rtol=0)
    # Where no weight is over the threshold nothing is retrieved, rather than NaN.
    assert localized_attention(query, key, value, 1.0, 0.7).tolist() == [[[[0.0, 0.0, 0.0]]]]


def test_output_is_half_where_the_last_layer_is_zero():
    decoder = Decoder(PAPER)
    for p in decoder.mlp[-1].parameters():
        torch.nn.init.zeros_(p)
    assert (decoder(torch.randn(1, PAPER.tokens, 72), torch.rand(7, 3)) == 0.5).all()


@both
def test_at_is_every_position_at_every_time(config):
    decoder = local_model(config).decoder.requires_grad_(False)
    tokens = torch.randn(2, config.tokens, config.token_dim, generator=generator())
    xy, t = torch.rand(2, 13, 2, generator=generator()), torch.tensor([0.0, 0.125, 0.6])
    pixels = decoder.at(tokens, xy, t)
    assert pixels.shape == (2, 3, 13, 3)
    for i, time in enumerate(t):
        q = torch.cat([xy, time.expand(2, 13, 1)], dim=-1)
        torch.testing.assert_close(pixels[:, i], decoder(tokens, q), atol=1e-4, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("config", [TINY, replace(PAPER, grid=(4, 3, 2))], ids=["carriers", "paper"])
def test_a_tile_does_not_change_the_picture(engine, config):
    decoder = local_model(config).decoder.requires_grad_(False)
    tokens = torch.randn(1, config.tokens, 72, generator=generator())
    x, y, t = torch.linspace(0, 1, 37)[None], torch.linspace(0, 1, 29)[None], torch.arange(8) / 8
    whole = decoder(tokens, torch.stack(torch.meshgrid(t, y[0], x[0], indexing="ij")[::-1], -1).reshape(-1, 3))
    whole = whole.reshape(1, 8, 29, 37, 3)
    for tile in (5, 16, 64, 256):
        tiled = decode_grid(decoder, tokens, x, y, t, engine=engine, tile=tile)
        torch.testing.assert_close(tiled, whole, atol=1e-4, rtol=0)


# --- encoder ------------------------------------------------------------------------------------------------------


def test_tokenizer_sees_patches_in_the_order_of_their_positions():
    """With the token former's blocks left out of the way, a change in one patch changes only that patch's token."""
    encoder = CoANeRV(replace(PAPER, cell=48)).encoder
    seen = []
    encoder.blocks[0].register_forward_hook(lambda module, arguments, result: seen.append(arguments[1]))
    clip = torch.rand(1, 8, 3, 48, 48, generator=generator())
    changed = clip.clone()
    changed[0, 5, :, 16:32, 32:48] += 0.5  # frame 5, row 1, column 2 of 3 x 3 patches
    with torch.no_grad():
        encoder(clip)
        encoder(changed)
    different = (seen[0] != seen[1]).any(-1)[0].nonzero().flatten().tolist()
    assert different == [5 * 9 + 1 * 3 + 2]


@both
def test_clips_of_a_batch_do_not_see_each_other(config):
    model = local_model(config)
    clips = torch.rand(3, 8, 3, 32, 32, generator=generator())
    with torch.no_grad():
        together = model.encoder(clips)
        assert together.shape == (3, config.tokens, config.token_dim)
        torch.testing.assert_close(together[1:2], model.encoder(clips[1:2]), atol=1e-5, rtol=0)


def backward(model: CoANeRV) -> None:
    """Give every parameter the gradient of a picture's energy."""
    model.zero_grad()
    clips = torch.rand(2, 8, 3, 32, 32, generator=generator())
    model.decoder(model.encoder(clips), torch.rand(64, 3, generator=generator())).square().mean().backward()


@pytest.mark.parametrize(
    "config",
    [
        replace(PAPER, grid=(3, 2, 2), depth=2),
        replace(PAPER, grid=(3, 2, 2), retrieval="lal"),
        replace(TINY, depth=2, mixer_depth=2, mlp_depth=3),
    ],
    ids=["paper", "lal", "carriers"],
)
def test_gradient_reaches_every_parameter(config):
    model = local_model(config)
    if config.carriers:
        # Layers that start at zero keep the gradient from those before them, until the first step has moved them.
        backward(model)
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    backward(model)
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        if name == "encoder.gain":  # also the decoder's: they cancel, until something is rounded in between
            assert p.grad.abs().max() < 1e-6
        else:
            assert p.grad.abs().max() > 0, name


# --- local start --------------------------------------------------------------------------------------------------


def test_anchors_are_the_centres_of_the_grid():
    points = local_start.anchors((4, 2, 1))
    assert points[:5].tolist() == [
        [0.125, 0.25, 0.5],
        [0.375, 0.25, 0.5],
        [0.625, 0.25, 0.5],
        [0.875, 0.25, 0.5],
        [0.125, 0.75, 0.5],
    ]
    assert len(points) == 8


@pytest.mark.parametrize("offset", [(0.0, 0.0, 0.0), (0.1, -0.2, 0.05), (-0.7, 0.3, 1.0)])
def test_shift_turns_the_features_of_a_point_into_those_of_the_moved_point(offset):
    axes = local_start._encoder_axes(CoANeRV(TINY).encoder)
    points = torch.rand(20, 3, generator=generator())
    moved = local_start._features(points + torch.tensor(offset), axes)
    assert moved.shape == (20, TINY.width)
    rotation = local_start._shift(axes, offset)
    torch.testing.assert_close(local_start._features(points, axes) @ rotation.T, moved, atol=2e-5, rtol=0)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(TINY.width), atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", [Config(), replace(PAPER, grid=(4, 4, 2))], ids=["default", "tiny"])
def test_decoder_starts_by_looking_at_the_nearest_anchor(config: Config):
    decoder = local_model(config).decoder
    anchors = local_start.anchors(config.grid)
    spread = torch.rand(len(anchors), 3, generator=generator()) - 0.5
    points = anchors + 0.6 * spread / torch.tensor(config.grid)  # closest to their own anchor along every axis
    with torch.no_grad():
        key, _ = decoder.keys_values(torch.zeros(1, *decoder.base.shape))
        query = decoder.query(decoder.gamma(points)).unflatten(-1, (config.decoder_heads, -1)).transpose(0, 1)
        weights = torch.softmax(query @ key[0].mT * decoder.scale, dim=-1)  # [H,Q,N]
    enveloped = config.decoder_heads - config.decoder_heads // 2
    for h in range(enveloped):
        nearest = weights[h].argmax(-1) == torch.arange(len(anchors))
        assert nearest.all(), f"head {h}: {(~nearest).sum()} of {len(anchors)} points look elsewhere"


def attention_at_the_start(attention: Attention, x: Tensor, memory: Tensor) -> Tensor:
    """What each head gives the rows of memory [H,n,m] for rows of x [n,D]."""
    query, key = (
        layer(rows).unflatten(-1, (attention.heads, attention.head_dim)).transpose(0, 1)
        for layer, rows in ((attention.query, x), (attention.key, memory))
    )
    return torch.softmax(query @ key.mT / math.sqrt(attention.head_dim), dim=-1)


@torch.no_grad()
def test_encoder_starts_by_looking_at_the_patches_around_its_anchor():
    config = Config(depth=1)
    encoder = local_model(config).encoder
    side = config.cell // config.patch
    patches = local_start.anchors((side, side, config.frames))
    weights = attention_at_the_start(encoder.blocks[0].cross, encoder.queries, encoder.patch_position)
    centre = (weights.mean(0) @ patches)[:, :2]  # [N,2], where a token looks on average
    distance = (centre - local_start.anchors(config.grid)[:, :2]).norm(dim=1)
    assert distance.mean() < 1 / side


@torch.no_grad()
def test_without_patches_each_head_starts_by_looking_at_another_neighbour():
    config = PRESETS["base"]
    encoder, places = local_model(config).encoder, local_start.anchors(config.grid)[:, :2]
    assert not hasattr(encoder, "tokenizer")
    weights = attention_at_the_start(encoder.blocks[0].self_attention, encoder.queries, encoder.queries)
    inside = ((places > 0.3) & (places < 0.7)).all(1)  # away from the edges, where a neighbour is missing
    found = (weights @ places - places)[:, inside].mean(1) * torch.tensor(config.grid[:2])  # [H,2], in token distances
    torch.testing.assert_close(found, torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), atol=0.25, rtol=0)


@both
def test_local_start_depends_on_its_generator_alone(config):
    a, b = local_model(config, seed=3), CoANeRV(config)
    local_start.start_local(b, generator(3))
    names = ["query.weight", "key.weight", "base"]
    if config.carriers:
        names = ["key_x", "key_y", "mix.weight", "value.weight", "linear.weight", "harmonics", "sets"]
    for name in names:
        assert torch.equal(a.decoder.state_dict()[name], b.decoder.state_dict()[name])
    if config.carriers:
        for name, tensor in a.encoder.analysis.state_dict().items():
            assert torch.equal(tensor, b.encoder.analysis.state_dict()[name])
        assert torch.equal(a.encoder.see.weight, b.encoder.see.weight)
