"""The decoder with carriers and the linear analysis, against their formulas written out once more here."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import local_model
from torch import Tensor

from coanerv_codec.analysis import SCALE, SWITCH, Analysis, window_starts
from coanerv_codec.carriers import CarrierDecoder
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.positions import cell_positions

BASE, TINY = PRESETS["base"], PRESETS["tiny"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- decoder ------------------------------------------------------------------------------------------------------


def random_decoder(config: Config) -> CarrierDecoder:
    """A decoder with every parameter at random, so that no part of the formula is multiplied by zero."""
    decoder = CarrierDecoder(config).requires_grad_(False)
    for name, p in decoder.named_parameters():
        p.normal_(0.0, p.shape[-1] ** -0.5 if p.ndim else 1.0, generator=generator(len(name)))
        if "norm" in name and name.endswith("weight"):
            p.add_(1.0)
    decoder.harmonics.copy_(torch.randint(0, 9, decoder.harmonics.shape, generator=generator()))
    return decoder


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def softmax(logits: Tensor) -> Tensor:
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def mixed(p: dict[str, Tensor], config: Config, tokens: Tensor) -> Tensor:
    """What the mixer makes of tokens [N,d]."""
    x = tokens @ p["mix.weight"].T + p["mix.bias"] + p["base"]
    for i in range(config.mixer_depth):
        b = {k.removeprefix(f"mixer.{i}."): v for k, v in p.items() if k.startswith(f"mixer.{i}.")}
        s = layer_norm(x, b["self_norm.weight"], b["self_norm.bias"])
        heads = []
        for h in range(config.mixer_width // 32):
            q, k, v = (s @ b[f"self_attention.{n}.weight"][32 * h : 32 * h + 32].T for n in ("query", "key", "value"))
            heads.append(softmax(q @ k.T / math.sqrt(32)) @ v)
        x = x + torch.cat(heads, 1) @ b["self_attention.out.weight"].T + b["self_attention.out.bias"]
        s = layer_norm(x, b["ff_norm.weight"], b["ff_norm.bias"])
        s = s @ b["feed_forward.0.weight"].T + b["feed_forward.0.bias"]
        s = s * 0.5 * (1 + torch.erf(s / math.sqrt(2)))
        x = x + s @ b["feed_forward.2.weight"].T + b["feed_forward.2.bias"]
    return layer_norm(x, p["norm.weight"], p["norm.bias"])


def written_out(decoder: CarrierDecoder, tokens: Tensor, q: Tensor) -> Tensor:
    """The module's docstring in float64, a head and a token at a time: tokens [N,d], q [Q,3] -> [Q,3]."""
    c = decoder.config
    p = {k: v.double() for k, v in decoder.state_dict().items()}
    tokens, q, j = tokens.double(), q.double(), p["harmonics"]
    x = mixed(p, c, tokens)
    w = torch.tensor(
        [(2.0 * c.cell) ** (i / (c.spatial_frequencies - 1)) for i in range(c.spatial_frequencies)]
    ).double()
    angles = [math.pi * q[:, axis, None] * w for axis in (0, 1)]
    gamma = torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], 1)
    u = torch.zeros(len(q), c.carriers, dtype=torch.float64)
    for h in range(c.decoder_heads):
        rows = slice(h * c.decoder_head_dim, (h + 1) * c.decoder_head_dim)
        key = p["key_base"][:, rows] + x @ p["key.weight"][rows].T
        logits = gamma @ p["query.weight"][rows].T @ key.T / (c.temperature * math.sqrt(c.decoder_head_dim))
        weights = softmax(logits)
        rows = slice(h * c.carriers, (h + 1) * c.carriers)
        value = x @ p["mixed_value.weight"][rows].T + p["mixed_value.bias"][rows]
        for mode in range(2**c.switches):
            share = torch.ones(c.tokens, 1, dtype=torch.float64)
            for i in range(c.switches):
                up = 1 / (1 + torch.exp(-p["switch_gain"] * tokens[:, c.token_dim - c.switches + i, None]))
                share = share * (up if mode >> i & 1 else 1 - up)
            first = (mode * c.decoder_heads + h) * c.carriers
            value = value + share * (tokens @ p["value.weight"][first : first + c.carriers].T)
        for n in range(c.tokens):
            column, row = n % c.grid[0], n // c.grid[0]
            sign = torch.tensor([-1.0]) ** (j[:, 0] * column + j[:, 1] * row)
            u += weights[:, n, None] * (sign * value[n])
    pixel = [q[:, 0] * (c.cell - 1), q[:, 1] * (c.cell - 1), q[:, 2] * c.frames]
    m = u
    for axis, size in enumerate([c.cell / c.grid[0], c.cell / c.grid[1], c.frames]):
        m = m * torch.cos(math.pi * j[:, axis] * ((pixel[axis] + 0.5) / size)[:, None])
    s = m @ p["mlp.0.weight"].T + p["mlp.0.bias"]
    for i in range(1, c.mlp_depth):
        s = (s / (1 + torch.exp(-s))) @ p[f"mlp.{i}.weight"].T + p[f"mlp.{i}.bias"]
    return m @ p["linear.weight"].T + p["linear.bias"] + s + 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"switches": 2},
        {"switches": 3},
        {"mixer_depth": 2, "mixer_width": 64},
        {"mixer_depth": 0},
        {"mlp_depth": 4},
        {"grid": (5, 3, 1), "frames": 5},
    ],
    ids=str,
)
def test_decoder_is_the_formula_written_out(changes):
    config = replace(TINY, decoder_heads=3, **changes)
    decoder = random_decoder(config)
    tokens = torch.randn(2, config.tokens, config.token_dim, generator=generator())
    q = torch.rand(2, 50, 3, generator=generator())
    expected = torch.stack([written_out(decoder, *pair) for pair in zip(tokens, q, strict=True)])
    assert expected.std() > 0.1
    # Angles reach 64 pi, whose float32 steps the random queries and the carriers amplify.
    torch.testing.assert_close(decoder(tokens, q).double(), expected, atol=1e-3, rtol=0)
    # One set of coordinates for all cells is the same as repeating it.
    torch.testing.assert_close(decoder(tokens, q[0]), decoder(tokens, q[:1].expand(2, -1, -1)), atol=1e-5, rtol=0)


def test_signs_are_those_of_the_wave_at_the_tokens():
    """The wave of harmonic j, n tokens further on, is the same wave times the sign."""
    decoder = random_decoder(TINY)
    gx, gy, _ = TINY.grid
    spacing = [TINY.cell / gx / (TINY.cell - 1), TINY.cell / gy / (TINY.cell - 1)]
    u = torch.tensor([0.013, 0.1, 0.21])
    first = decoder.wave(0, u)[:, None] * decoder.wave(1, u)
    for n, sign in enumerate(decoder.signs()):
        x, y = u + n % gx * spacing[0], u + n // gx * spacing[1]
        moved = decoder.wave(0, x)[:, None] * decoder.wave(1, y)
        torch.testing.assert_close(moved, first * sign, atol=1e-4, rtol=0)
    assert set(decoder.signs().flatten().tolist()) == {-1.0, 1.0}


def test_tokens_moved_by_one_draw_the_picture_moved_by_their_distance(monkeypatch):
    decoder = local_model(BASE).decoder.requires_grad_(False)
    gx, gy, _ = BASE.grid
    tokens = torch.zeros(1, gy, gx, 72)
    tokens[:, 4:7, 2:5] = 0.1 * torch.randn(1, 3, 3, 72, generator=generator())
    distance = BASE.cell // gx

    def error_of_the_move() -> float:
        pictures = [
            decoder.at(v.flatten(1, 2), cell_positions(BASE.cell)[None], torch.tensor([0.25])).view(128, 128, 3) - 0.5
            for v in (tokens, tokens.roll(1, dims=2))
        ]
        difference = pictures[1][:, distance:] - pictures[0][:, :-distance]
        return (difference.square().mean() / pictures[0].square().mean()).sqrt().item()

    assert error_of_the_move() < 0.02
    monkeypatch.setattr(decoder, "signs", lambda: torch.ones(BASE.tokens, BASE.carriers))
    assert error_of_the_move() > 0.5


def test_the_decoder_takes_bf16_autocast():
    """Attention stays in full precision there, so that only the values are rounded."""
    model = local_model(TINY).requires_grad_(False)
    clip = torch.rand(1, 8, 3, 32, 32, generator=generator())
    tokens, q = model.encoder(clip), torch.rand(200, 3, generator=generator())
    exact = model.decoder(tokens, q)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.decoder(tokens, q)
    assert 0 < (rounded - exact).square().mean().sqrt() < 0.01


# --- analysis -----------------------------------------------------------------------------------------------------

GRIDS = [(2, 3, 1), (4, 4, 1), (5, 7, 1), (6, 1, 1), (32, 8, 1)]


@pytest.mark.parametrize(
    ("grid", "switches"), [*((grid, 1) for grid in GRIDS), ((5, 7, 1), 2), ((4, 4, 1), 3)], ids=str
)
def test_analysis_is_a_loop_over_the_tokens(grid, switches):
    config = replace(TINY, grid=grid, frames=3, switches=switches)
    gx, gy, _ = grid
    analysis = Analysis(config).requires_grad_(False)
    analysis.weight.normal_(generator=generator())
    clips = torch.rand(2, 3, 3, 32, 32, generator=generator())
    py, px = analysis.phases
    rows, chosen = [], []
    for iy in range(gy):
        for ix in range(gx):
            seen = []
            for planes, side, margin in ((clips[:, :, :1], 32, 8), (clips[:, :, 1:], 16, 4)):
                if side == 16:
                    planes = sum(planes[..., a::2, b::2] for a in (0, 1) for b in (0, 1)) / 4
                y, x = (
                    [
                        min(max(p, 0), side - 1)
                        for p in range(i * side // n - margin, i * side // n + math.ceil(side / n) + margin)
                    ]
                    for i, n in ((iy, gy), (ix, gx))
                )
                seen.append((planes[..., y, :][..., x] - 0.5).flatten(1))
            for out in SCALE * torch.cat(seen, 1) @ analysis.weight[(iy % py) * px + ix % px]:
                sets = out.view(2**switches, 72 - switches)
                chosen.append(max(range(len(sets)), key=lambda m, sets=sets: sets[m].square().sum().item()))
                signs = [SWITCH if chosen[-1] >> i & 1 else -SWITCH for i in range(switches)]
                rows.append(torch.cat([sets[chosen[-1]], torch.tensor(signs)]))
    expected = torch.stack(rows).unflatten(0, (gx * gy, 2)).transpose(0, 1)
    assert len(set(chosen)) > 1
    torch.testing.assert_close(analysis(clips), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_tokens_of_one_phase_stand_alike_to_their_windows(grid):
    """In luma and in chroma, so that one matrix can be right for all of them."""
    analysis = Analysis(replace(TINY, grid=grid))
    for count, phases in ((grid[1], analysis.phases[0]), (grid[0], analysis.phases[1])):
        assert count % phases == 0
        for side in (32, 16):
            starts, width, _ = window_starts(count, side)
            offsets = [i * side - start * count for i, start in enumerate(starts)]  # of the token, in 1/count samples
            assert all(0 <= offset < count for offset in offsets)
            assert all(offset == offsets[i % phases] for i, offset in enumerate(offsets))
            assert all(start + width >= (i + 1) * side // count for i, start in enumerate(starts))
    assert analysis.weight.shape[0] == math.prod(analysis.phases)


def test_base_has_three_phases():
    with torch.device("meta"):
        assert Analysis(BASE).phases == (3, 1)


def test_equal_content_one_token_further_gives_equal_tokens():
    """Also along y, where three tokens of base stand 32 pixels apart. Tokens at the edge see it repeated, so not those."""
    analysis = local_model(BASE).encoder.analysis.requires_grad_(False)
    clip = torch.rand(1, 8, 3, 128, 128, generator=generator())
    tokens, right, down = (analysis(c).view(12, 8, 72) for c in (clip, clip.roll(16, dims=-1), clip.roll(32, dims=-2)))
    assert tokens.std() > 0.01
    torch.testing.assert_close(right[:, 2:7], tokens[:, 1:6], atol=1e-5, rtol=0)
    torch.testing.assert_close(down[4:11], tokens[1:8], atol=1e-5, rtol=0)
    assert (right[:, 2:7] - tokens[:, 2:7]).abs().max() > 0.1


def test_analysis_ignores_autocast():
    analysis = local_model(TINY).encoder.analysis.requires_grad_(False)
    clip = torch.rand(1, 8, 3, 32, 32, generator=generator())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(analysis(clip), analysis(clip.float()))
        assert analysis(clip).dtype == torch.float32
        inside = analysis(clip)
    assert torch.equal(inside, analysis(clip))
