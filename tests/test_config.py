"""The configuration: round trip through JSON, and a clear refusal of everything that makes no model."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coanerv_codec.config import PRESETS, Config


@pytest.mark.parametrize("name", PRESETS)
def test_json_round_trip(name):
    assert Config.from_json(PRESETS[name].to_json()) == PRESETS[name]


def test_missing_fields_mean_the_default():
    assert Config.from_json("{}") == Config()
    assert Config.from_json('{"depth": 7}') == replace(Config(), depth=7)


def test_paper_presets_have_the_papers_numbers():
    for name, tokens in [("paper-s", 384), ("paper-m", 512), ("paper-l", 768)]:
        assert PRESETS[name] == PRESETS[f"{name}-f8"]
        for frames in (4, 8, 16):
            c = PRESETS[f"{name}-f{frames}"]
            assert (c.frames, c.cell, c.tokens, c.token_dim, c.patch) == (frames, 256, tokens, 72, 16)
            assert (c.width, c.depth, c.heads, c.head_dim, c.feed_forward) == (768, 6, 6, 64, 3072)
            assert (c.decoder_heads, c.decoder_head_dim, c.temperature) == (6, 64, 0.4)
            assert (c.mlp_depth, c.mlp_hidden, c.retrieval, c.carriers) == (2, 72, "temperature", 0)
            assert c.patches == frames * 16 * 16


def test_base_stores_as_many_values_per_picture_as_paper_s():
    base, paper = PRESETS["base"], PRESETS["paper-s"]
    assert base.frames == paper.frames == 8
    assert (paper.cell // base.cell) ** 2 * base.tokens * base.token_dim == paper.tokens * paper.token_dim == 27648


@pytest.mark.parametrize("frequencies", [3, 6, 12, 24])
def test_frequencies_are_shared_out_four_to_one(frequencies):
    c = replace(Config(), frequencies=frequencies, token_dim=6 * frequencies)
    assert c.spatial_frequencies == 4 * c.temporal_frequencies
    assert 2 * c.spatial_frequencies + c.temporal_frequencies == 3 * frequencies
    assert 2 * (2 * c.spatial_frequencies + c.temporal_frequencies) == c.gamma_dim


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nope",
        "null",
        "[]",
        "[" * 100_000,
        '{"colour": 1}',
        '{"frames": 0}',
        '{"frames": -8}',
        '{"frames": 8.0}',
        '{"frames": true}',
        '{"frames": 1e400}',
        '{"frames": 65537}',
        '{"width": 4294967296}',
        '{"depth": 65536}',
        '{"mlp_depth": 65536}',
        '{"mlp_depth": 1}',
        '{"frames": 65536, "cell": 65536, "patch": 1}',
        '{"grid": [1024, 1024, 1024]}',
        '{"grid": 5}',
        '{"grid": null}',
        '{"grid": "862"}',
        '{"grid": [8, 6]}',
        '{"grid": [8, 6, 0]}',
        '{"grid": [8, 6, 2.0]}',
        '{"grid": {"x": 8, "y": 6, "t": 2}}',
        '{"cell": 100}',
        '{"frequencies": 10, "token_dim": 60}',
        '{"frequencies": 9}',
        '{"temperature": 0}',
        '{"temperature": -0.4}',
        '{"temperature": NaN}',
        '{"temperature": Infinity}',
        '{"temperature": "0.4"}',
        '{"temperature": 1' + "0" * 400 + "}",
        '{"retrieval": "hard"}',
        '{"retrieval": 1}',
        '{"lal_threshold": 1}',
        '{"lal_threshold": NaN}',
        '{"gamma_skip": false}',
        '{"carriers": -1}',
        '{"carriers": true}',
        '{"carriers": 96}',
        '{"carriers": 96, "grid": [8, 6, 1], "retrieval": "lal"}',
        '{"carriers": 96, "grid": [8, 6, 1], "mixer_width": 100}',
        '{"carriers": 96, "grid": [5, 7, 1]}',
        '{"carriers": 96, "grid": [8, 6, 1], "switches": 3}',
        '{"carriers": 96, "grid": [8, 6, 1], "switches": 6}',
        '{"carriers": 2049, "grid": [8, 6, 1]}',
        '{"carriers": 96, "grid": [8, 6, 1], "cell": 129, "patch": 3}',
        '{"mixer_depth": 65}',
        '{"mixer_depth": -1}',
        '{"mixer_width": 0}',
    ],
    ids=lambda text: text[:40],
)
def test_what_makes_no_model_is_refused(text):
    with pytest.raises(ValueError, match=r".") as caught:
        Config.from_json(text)
    assert "\n" not in str(caught.value)


def test_what_carriers_need_is_said():
    base = PRESETS["base"]
    for changes, text in [
        ({"grid": (8, 6, 2)}, "one anchor in t"),
        ({"retrieval": "lal"}, "no LAL retrieval"),
        ({"mixer_width": 200}, "mixer_width that is a multiple of 32"),
        ({"grid": (5, 7, 1)}, "even number of tokens"),
        ({"switches": 3}, "even number of values"),
        ({"carriers": 3000}, "at most 2048 carriers"),
        ({"cell": 33, "patch": 3}, "even cell side"),
    ]:
        with pytest.raises(ValueError, match=text):
            replace(base, **changes)
        replace(base, **changes | {"carriers": 0})  # the paper's decoder does not mind
    assert replace(base, mixer_depth=0).mixer_depth == 0


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([f.name for f in fields(Config)]), JSON_VALUES, max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_json_gives_a_configuration_or_a_value_error(data):
    try:
        config = Config.from_json(json.dumps(data))
    except ValueError:
        return
    assert Config.from_json(config.to_json()) == config
