"""The start as a lapped transform: windows, waves and analysis fit each other, and show a picture untrained."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from conftest import local_model
from torch import Tensor

from coanerv_codec.carriers import switches_of
from coanerv_codec.config import PRESETS, Config
from coanerv_codec.errors import CoanervError
from coanerv_codec.lapped_start import DC_GAIN, WIDTHS, anchors, choose_waves, dual, windows
from coanerv_codec.model import CoANeRV
from coanerv_codec.positions import cell_positions, frame_times

BASE, TINY = PRESETS["base"], PRESETS["tiny"]
SHAPES = pytest.mark.parametrize(
    "config", [BASE, TINY, replace(TINY, cell=64, grid=(5, 8, 1))], ids=["base", "tiny", "odd"]
)


def shown(model: CoANeRV, tokens: Tensor) -> Tensor:
    """Tokens [1,N,d] -> the pixels [1,F,3,Q] that the decoder draws, a third of them."""
    xy = cell_positions(model.config.cell)[None, ::3]
    return model.decoder.at(tokens, xy, frame_times(model.config.frames)).transpose(2, 3)


def directly(model: CoANeRV, clip: Tensor) -> Tensor:
    """Clip [1,F,3,S,S] -> tokens [1,N,d] that the analysis alone gives."""
    analysis = model.encoder.analysis
    amplitudes = analysis(clip)
    mode = analysis.choose(amplitudes)
    return torch.cat([analysis.pick(amplitudes, mode), switches_of(mode, model.config.switches)], dim=-1)


def thin(clip: Tensor) -> Tensor:
    """Clip [1,F,3,S,S] -> the same pixels of it."""
    return clip.flatten(3)[..., ::3]


def psnr(a: Tensor, b: Tensor) -> float:
    return -10 * math.log10((a - b).square().mean().item())


def moving(config: Config) -> Tensor:
    """Smooth gradients that move, different in each channel."""
    t, y, x = torch.meshgrid(
        torch.arange(config.frames) / config.frames, *[torch.arange(config.cell) / config.cell] * 2, indexing="ij"
    )
    channels = [
        0.5 + 0.3 * torch.sin(2 * math.pi * (x + 0.5 * y - 0.3 * t)),
        0.5 + 0.1 * torch.cos(2 * math.pi * (0.5 * x - y)),
        0.4 + 0.2 * x * y,
    ]
    return torch.stack(channels, 1)[None]


# --- waves --------------------------------------------------------------------------------------------------------


@SHAPES
def test_waves_are_unique_and_all_modes_start_with_the_mean(config):
    waves, sets = choose_waves(config)
    assert (waves, sets) == choose_waves(config)
    assert len(set(waves)) == len(waves) == config.carriers
    assert len(sets) == config.sets
    for parts in sets:
        assert [len(part) for part in parts] == 3 * [config.amplitudes // 2]
        assert waves[parts[0][0]] == (0, 0, 0, 0)
        for count in (1, 2, 3):  # whatever a token has room for
            numbers = [i for part in parts[:count] for i in part]
            chosen = {waves[i] for i in numbers}
            assert len(chosen) == len(numbers)
            # Every wave that is in has all slower ones of its channel in too.
            for wave in chosen:
                assert all(wave._replace(**{a: getattr(wave, a) - 1}) in chosen for a in "xyt" if getattr(wave, a) > 0)
        assert {w.channel for w in chosen} == {0, 1, 2}
    # Below the sampling limit of a token's pixels.
    size = (config.cell / config.grid[0], config.cell / config.grid[1], config.frames)
    assert all(j < s for wave in waves for j, s in zip(wave[1:], size, strict=True))
    changing = [sum(waves[i].t > 0 for part in parts[:2] for i in part) for parts in sets]
    assert changing == sorted(changing)
    assert 4 * changing[0] < changing[-1]


@SHAPES
def test_a_wave_stands_at_the_same_place_in_most_sets_that_have_it(config):
    places = defaultdict(set)
    for parts in choose_waves(config)[1]:
        for part, numbers in enumerate(parts):
            for place, number in enumerate(numbers):
                places[part, number].add(place)
    assert sum(len(p) == 1 for p in places.values()) > 0.9 * len(places)


@pytest.mark.parametrize("changes", [{"grid": (16, 16, 1), "frames": 2, "carriers": 80}, {"carriers": 106}], ids=str)
def test_carriers_that_do_not_suit_the_grid_are_refused(changes):
    """Tokens of 2 x 2 pixels have six waves in all; two sets of 105 waves share too few for 106 carriers."""
    with pytest.raises(CoanervError, match=f"{changes['carriers']} carriers do not suit"):
        choose_waves(replace(TINY, **changes))


def test_what_the_start_lacks_is_said():
    with pytest.raises(CoanervError, match="luma_functions and chroma_functions must be at least as many"):
        local_model(replace(TINY, luma_functions=5))


@SHAPES
def test_the_decoder_and_the_analysis_have_the_chosen_waves(config):
    model = local_model(config).requires_grad_(False)
    waves, sets = choose_waves(config)
    assert model.decoder.harmonics.tolist() == [list(map(float, w[1:])) for w in waves]
    assert [model.decoder.linear.weight[:, k].argmax().item() for k in range(len(waves))] == [w.channel for w in waves]
    assert model.decoder.value.weight[: config.carriers].argmax(0).tolist() == list(range(config.carriers))
    assert model.decoder.sets.tolist() == model.encoder.analysis.sets.tolist() == sets
    spaces = model.encoder.analysis.space_of.tolist()
    assert all((spaces[i] == spaces[j]) == (a[:3] == b[:3]) for i, a in enumerate(waves) for j, b in enumerate(waves))


def test_a_token_is_still_or_moves_as_its_window_does():
    """Fine texture at rest on the left, a coarse pattern that flickers on the right."""
    analysis = local_model(BASE).encoder.analysis.requires_grad_(False)
    y, x = torch.meshgrid(torch.arange(128.0), torch.arange(128.0), indexing="ij")
    clip = torch.full((1, 8, 3, 128, 128), 0.5)
    clip[:, :, 0, :, :64] = 0.5 + 0.2 * (torch.cos(math.pi * x / 2.5) * torch.cos(math.pi * y / 3))[:, :64]
    flicker = torch.cos(math.pi * 3 * (torch.arange(8) + 0.5) / 8)[:, None, None]
    clip[0, :, 0, :, 64:] = 0.5 + 0.2 * flicker * torch.cos(math.pi * y / 16)[:, 64:]
    chosen = (analysis.choose(analysis(clip)) % BASE.sets).view(12, 8)
    assert (chosen[:, :3] < 2).all()  # the stillest sets
    assert (chosen[:, 5:] > 3).all()


# --- windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("count", "size"), [(8, 128), (12, 128), (3, 32), (1, 32)])
def test_windows_add_up_to_one_and_stand_about_their_anchors(count, size, width):
    w = windows(count, size, width)
    assert w.shape == (count, size)
    torch.testing.assert_close(w.sum(0), torch.ones(size, dtype=torch.float64))
    torch.testing.assert_close(w.flip(0, 1), w)
    centre = ((torch.arange(count) + 0.5) * size / count).double()  # in pixels from the edge
    torch.testing.assert_close(anchors(count, size) * (size - 1) + 0.5, centre)
    # Half of its weight changes hands where two tokens meet.
    for i in range(1, count):
        border = i * size / count - 0.5
        below, above = w[:, math.floor(border)], w[:, math.ceil(border)]
        assert below[i - 1] >= below[i] - 1e-9
        assert above[i] >= above[i - 1] - 1e-9


@SHAPES
def test_attention_starts_as_the_windows(config):
    decoder = local_model(config).decoder.requires_grad_(False)
    line = cell_positions(config.cell)[: config.cell, 0]

    def difference() -> float:
        worst = 0.0
        for axis in (0, 1):
            for h, weights in enumerate(decoder.attend(axis, line).unbind(1)):  # [S,count]
                expected = windows(config.grid[axis], config.cell, WIDTHS[h])
                worst = max(worst, (weights.T - expected).abs().max().item())
        return worst

    assert difference() < 1e-5


def test_the_dual_finds_the_amplitudes_of_windowed_cosines():
    count, size, harmonics = 12, 128, 9
    window = windows(count, size, WIDTHS[0])
    amplitudes = torch.randn(count, harmonics, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signal = torch.zeros(size, dtype=torch.float64)
    for n in range(count):
        for j in range(harmonics):
            local = (torch.arange(size) + 0.5) * count / size - n
            signal += amplitudes[n, j] * window[n] * (math.sqrt(2) if j else 1) * torch.cos(math.pi * j * local)
    analysis = dual(count, size, harmonics, window)
    torch.testing.assert_close(torch.einsum("njs,s->nj", analysis, signal), amplitudes, atol=1e-5, rtol=0)


# --- the codec it starts as ---------------------------------------------------------------------------------------


@SHAPES
def test_the_means_token_alone_draws_a_constant(config):
    """Windows add up to one, and the value undoes the gain of the mean."""
    model = local_model(config).requires_grad_(False)
    for value in (0.0, 0.3, 1.0):
        tokens = torch.zeros(1, config.tokens, config.token_dim)
        tokens[..., 0] = DC_GAIN * (value - 0.5)
        pixels = shown(model, tokens)
        torch.testing.assert_close(pixels[:, :, 0], torch.full_like(pixels[:, :, 0], value), atol=1e-4, rtol=0)
        assert (pixels[:, :, 1:] == 0.5).all()


@SHAPES
def test_a_constant_clip_comes_back(config):
    """Exactly at mid-grey. Elsewhere the cut-off tails of the analysis leave a ripple, which is small on average."""
    model = local_model(config).requires_grad_(False)
    for colour in [(0.5, 0.5, 0.5), (1.0, 0.5, 0.5), (0.0, 0.2, 0.9)]:
        clip = torch.tensor(colour)[:, None, None].expand(1, config.frames, 3, config.cell, config.cell)
        direct, wanted = shown(model, directly(model, clip)), thin(clip)
        if colour == (0.5, 0.5, 0.5):
            assert torch.equal(direct, wanted)
        assert (direct - wanted).square().mean().sqrt() < 3 / 255
        assert (direct - wanted).mean((0, 1, 3)).abs().max() < 3 / 255
        # What the token former adds is next to nothing.
        assert (shown(model, model.encoder(clip)) - wanted).square().mean().sqrt() < 4 / 255


@pytest.mark.parametrize(("config", "least"), [(BASE, 40), (TINY, 32)], ids=["base", "tiny"])
def test_the_start_shows_smooth_motion_where_the_papers_start_does_not(config, least):
    clip = moving(config)
    found = {}
    for name, c in [("carriers", config), ("paper", replace(config, carriers=0))]:
        model = local_model(c).requires_grad_(False)
        found[name] = psnr(shown(model, model.encoder(clip)), thin(clip))
    assert found["carriers"] > least
    assert found["carriers"] > found["paper"] + 15


def test_the_start_survives_half_precision():
    """As a checkpoint stores it. Where two sets are worth the same, another may be chosen, which shows no less."""
    clip = moving(BASE)
    exact, stored = local_model(BASE).requires_grad_(False), local_model(BASE).requires_grad_(False).half().float()
    tokens = exact.encoder(clip)
    assert (shown(exact, tokens) - shown(stored, tokens)).abs().max() < 1 / 255
    quality = [psnr(shown(model, model.encoder(clip)), thin(clip)) for model in (exact, stored)]
    assert quality[1] == pytest.approx(quality[0], abs=0.1)
