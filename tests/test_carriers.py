"""The decoder with carriers and the linear analysis, against their formulas written out once more here."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import local_model
from torch import Tensor

from coanerv_codec.analysis import FAINT, SCALE, Analysis, window_starts
from coanerv_codec.carriers import GAIN_RATE, SWITCH, CarrierDecoder, mode_of, partner, switches_of
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
    decoder.gain.div_(GAIN_RATE)
    decoder.harmonics.copy_(torch.randint(0, 9, decoder.harmonics.shape, generator=generator()))
    decoder.sets.copy_(random_sets(config))
    return decoder


def random_sets(config: Config) -> Tensor:
    """Different carriers for each set [M,3,A/2]."""
    size = 3 * config.amplitudes // 2
    return torch.stack(
        [torch.randperm(config.carriers, generator=generator(m))[:size].view(3, -1) for m in range(config.sets)]
    ).float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def softmax(logits: Tensor) -> Tensor:
    e = (logits - logits.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def spread(p: dict[str, Tensor], config: Config, tokens: Tensor) -> tuple[list[int], Tensor]:
    """The modes of tokens [N,d], and what each says of all carriers [N,C], a token and a value at a time."""
    count, half, sets = config.switches, config.amplitudes // 2, p["sets"].long().tolist()
    modes = [sum(2**i for i in range(count) if token[len(token) - count + i] > 0) for token in tokens.tolist()]
    tokens = torch.stack([t[:-count] / torch.exp(GAIN_RATE * p["gain"][m]) for t, m in zip(tokens, modes, strict=True)])
    found = torch.zeros(len(tokens), config.carriers, dtype=torch.float64)
    for n, (mode, token) in enumerate(zip(modes, tokens, strict=True)):
        other = (n + len(tokens) // 2) % len(tokens)
        chosen, lends = sets[mode % config.sets], mode >= config.sets
        for k in range(half):
            found[n, chosen[0][k]] += token[k]
            if not lends:
                found[n, chosen[1][k]] += token[half + k]
            if modes[other] >= config.sets:
                found[n, chosen[2][k]] += tokens[other, half + k]
    return modes, found


def mixed(p: dict[str, Tensor], config: Config, modes: list[int], amplitudes: Tensor) -> Tensor:
    """What the mixer makes of amplitudes [N,C]."""
    x = amplitudes @ p["mix.weight"].T + p["mix.bias"] + p["mode_base"][modes] + p["base"]
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
    modes, amplitudes = spread(p, c, tokens)
    x = mixed(p, c, modes, amplitudes)
    w = torch.tensor(
        [(2.0 * c.cell) ** (i / (c.spatial_frequencies - 1)) for i in range(c.spatial_frequencies)]
    ).double()
    angles = [math.pi * q[:, axis, None] * w for axis in (0, 1)]
    gamma = [torch.cat([angle.sin(), angle.cos()], 1) for angle in angles]
    u = torch.zeros(len(q), c.carriers, dtype=torch.float64)
    for h in range(c.decoder_heads):
        along = [
            softmax(g @ p[key][h].T / (c.temperature * math.sqrt(2 * c.spatial_frequencies)))
            for g, key in zip(gamma, ("key_x", "key_y"), strict=True)
        ]
        rows = slice(h * c.carriers, (h + 1) * c.carriers)
        value = x @ p["mixed_value.weight"][rows].T + p["mixed_value.bias"][rows]
        value = value + amplitudes @ p["value.weight"][rows].T
        for n in range(c.tokens):
            column, row = n % c.grid[0], n // c.grid[0]
            sign = torch.tensor([-1.0]) ** (j[:, 0] * column + j[:, 1] * row)
            u += (along[0][:, column] * along[1][:, row])[:, None] * (sign * value[n])
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
        {"switches": 4},
        {"mixer_depth": 2, "mixer_width": 64},
        {"mixer_depth": 0},
        {"mlp_depth": 4},
        {"grid": (5, 2, 1), "frames": 5},
    ],
    ids=str,
)
def test_decoder_is_the_formula_written_out(changes):
    config = replace(TINY, decoder_heads=3, **changes)
    decoder = random_decoder(config)
    tokens = torch.randn(2, config.tokens, config.token_dim, generator=generator())
    modes = [m for bank in tokens for m in spread(decoder.state_dict(), config, bank)[0]]
    assert min(modes) < config.sets <= max(modes)  # some lend
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

GRIDS = [(2, 3, 1), (4, 4, 1), (5, 6, 1), (6, 1, 1), (32, 8, 1)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_analysis_is_a_loop_over_the_tokens(grid):
    config = replace(TINY, grid=grid, frames=3, luma_functions=9, chroma_functions=5)
    gx, gy, _ = grid
    analysis = Analysis(config).requires_grad_(False)
    for p in analysis.parameters():
        p.normal_(generator=generator(p.ndim))
    analysis.space_of.copy_(torch.randint(14, (config.carriers,), generator=generator()))
    clips = torch.rand(2, 3, 3, 32, 32, generator=generator())
    py, px = analysis.phases
    rows = []
    for iy in range(gy):
        for ix in range(gx):
            phase, found = (iy % py) * px + ix % px, []
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
                seen = (planes[..., y, :][..., x] - 0.5).flatten(2)  # [2,3,inputs]
                found.append(SCALE * seen @ (analysis.luma if side == 32 else analysis.chroma)[phase])
            found = torch.cat(found, -1)  # [2,3,14]
            rows.append(
                torch.stack([found[..., int(s)] @ w for s, w in zip(analysis.space_of, analysis.time, strict=True)], -1)
            )
    torch.testing.assert_close(analysis(clips), torch.stack(rows, 1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("switches", [2, 4])
def test_modes_keep_most_of_what_is_worth_coding(switches):
    """Compared with every choice that a pair of tokens has, and through the decoder, which finds each value again."""
    config = replace(TINY, switches=switches)
    analysis, decoder = Analysis(config).requires_grad_(False), random_decoder(config)
    analysis.sets.copy_(decoder.sets)
    decoder.gain.zero_()  # the analysis alone knows of no gains
    # Tokens of different liveliness, so that some lend.
    size = torch.rand(5, config.tokens, 1, generator=generator()) ** 3
    amplitudes = FAINT * 3 * size * torch.randn(5, config.tokens, config.carriers, generator=generator(1))
    mode = analysis.choose(amplitudes)
    tokens = torch.cat([analysis.pick(amplitudes, mode), switches_of(mode, switches)], -1)
    told, kept = decoder.spread(tokens)
    assert torch.equal(told, mode)
    assert torch.equal(kept, torch.where(kept != 0, amplitudes, 0.0))
    worth = (amplitudes.square() - FAINT**2).clamp_min(0)
    assert (mode >= config.sets).any()
    for b in range(5):
        for n in range(config.tokens // 2):
            pair = [n, n + config.tokens // 2]
            best = max(
                sum(
                    max(worth[b, i, decoder.sets[m, :parts].flatten().long()].sum().item() for m in range(config.sets))
                    for i, parts in zip(pair, split, strict=True)
                )
                for split in ((2, 2), (1, 3), (3, 1))
            )
            assert worth[b, pair][kept[b, pair] != 0].sum().item() == pytest.approx(best, rel=1e-5)


def test_gains_change_what_is_stored_and_nothing_that_is_drawn():
    model = local_model(TINY)
    clips = torch.rand(2, TINY.frames, 3, TINY.cell, TINY.cell, generator=generator())
    xy, t = cell_positions(TINY.cell)[None, ::7], torch.tensor([0.0, 0.5])
    before = model.encoder(clips)
    drawn = model.decoder.at(before, xy, t)
    with torch.no_grad():
        model.decoder.gain.uniform_(-0.1, 0.1, generator=generator(1))
    after = model.encoder(clips)
    mode = mode_of(after[..., TINY.amplitudes :])
    assert len(mode.unique()) > 1
    ratio = torch.exp(GAIN_RATE * model.decoder.gain[mode])
    torch.testing.assert_close(after[..., : TINY.amplitudes], before[..., : TINY.amplitudes] * ratio)
    torch.testing.assert_close(after[..., TINY.amplitudes :], before[..., TINY.amplitudes :])
    torch.testing.assert_close(model.decoder.at(after, xy, t), drawn, atol=1e-5, rtol=0)


def test_switches_say_the_mode():
    mode = torch.arange(16).view(2, 8)
    switches = switches_of(mode, 4)
    assert switches.abs().unique().tolist() == [pytest.approx(SWITCH)]
    assert torch.equal(mode_of(switches), mode)


def test_partners_are_each_others():
    tokens = torch.arange(12).view(1, 6, 2)
    assert partner(tokens)[0, :, 0].tolist() == [6, 8, 10, 0, 2, 4]
    assert torch.equal(partner(partner(tokens)), tokens)


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
    assert len(analysis.luma) == len(analysis.chroma) == math.prod(analysis.phases)


def test_base_has_three_phases():
    with torch.device("meta"):
        assert Analysis(BASE).phases == (3, 1)


def test_equal_content_one_token_further_gives_equal_tokens():
    """Also along y, where three tokens of base stand 32 pixels apart. Tokens at the edge see it repeated, so not those."""
    analysis = local_model(BASE).encoder.analysis.requires_grad_(False)
    clip = torch.rand(1, 8, 3, 128, 128, generator=generator())
    tokens, right, down = (analysis(c).view(12, 8, -1) for c in (clip, clip.roll(16, dims=-1), clip.roll(32, dims=-2)))
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
