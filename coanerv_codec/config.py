"""The model's shape in one dataclass, and the named presets.

A checkpoint carries its `Config` as JSON, so a field added later needs a default that means "as before".
"""

import dataclasses
import json
import math
from dataclasses import dataclass

from coanerv_codec.bank import Hints

RETRIEVALS = ("temperature", "lal")
MIXER_HEAD_DIM = 32  # width of a head of the mixer's attention


@dataclass(frozen=True)
class Config:
    """Everything that fixes the shapes of the encoder and of the shared decoder (names as in the paper)."""

    frames: int = 8  # F, frames per clip
    cell: int = 128  # S, side of a cell in pixels (H = W = S)
    grid: tuple[int, int, int] = (8, 6, 2)  # token anchors along x, y, t; N is their product
    token_dim: int = 72  # d, values stored per token
    # Encoder: tokenizer and token former.
    patch: int = 16  # P, of the paper's encoder; with carriers there are no patches
    width: int = 256  # D
    depth: int = 4  # L
    heads: int = 4
    head_dim: int = 64
    feed_forward: int = 1024
    # Shared coordinate decoder.
    frequencies: int = 12  # k per axis, shared out 4:1 between space and time
    decoder_heads: int = 6
    decoder_head_dim: int = 64
    temperature: float = 0.4  # tau
    mlp_depth: int = 2  # linear layers
    mlp_hidden: int = 72
    retrieval: str = "temperature"  # or "lal" (ANR-V)
    lal_threshold: float = 0.001  # m, only for "lal"
    # Beyond the paper (docs/model.md): tokens drive carrier waves, and are mixed with each other before they are read.
    carriers: int = 0  # C, waves that the retrieved values modulate; 0 is the paper's decoder
    switches: int = 2  # last values of a token, whose signs choose a set of waves and say (the last) whether it lends
    luma_functions: int = 160  # of space, in the encoder's analysis; only with carriers
    chroma_functions: int = 80
    mixer_depth: int = 2  # self-attention blocks over the tokens in the decoder, only with carriers
    mixer_width: int = 192

    def __post_init__(self) -> None:
        counts = [f.name for f in dataclasses.fields(self) if f.type is int]
        for name in counts:
            value, least = getattr(self, name), 0 if name in ("carriers", "mixer_depth") else 1
            if type(value) is not int or not least <= value <= 65536:
                raise ValueError(f"{name} must be a whole number from {least} to 65536, not {value!r}")
        if (
            type(self.grid) is not tuple
            or len(self.grid) != 3
            or any(type(n) is not int or not 1 <= n <= 1024 for n in self.grid)
        ):
            raise ValueError(f"grid must be three whole numbers from 1 to 1024, not {self.grid!r}")
        # A layer costs memory before its shape can be compared with a file's, and a product of sizes must not overflow.
        if max(self.depth, self.mlp_depth, self.mixer_depth) > 64:
            raise ValueError("depth, mlp_depth and mixer_depth must be at most 64")
        if max(self.tokens, self.patches) > 2**24:
            raise ValueError(f"{self.tokens} tokens and {self.patches} patches per cell: at most {2**24} are possible")
        if self.cross and self.cell % self.patch:
            raise ValueError(f"the cell side {self.cell} is no multiple of the patch side {self.patch}")
        if self.frequencies % 3:
            raise ValueError(f"frequencies must be a multiple of 3, not {self.frequencies}")
        if self.gamma_dim != self.token_dim:
            raise ValueError(f"6 x frequencies ({self.gamma_dim}) must equal token_dim ({self.token_dim})")
        if self.width % 2:
            raise ValueError(f"width must be even, not {self.width}")
        if self.mlp_depth < 2:
            raise ValueError("mlp_depth counts the linear layers and is at least 2")
        if not 0 < self.temperature <= 1e6:
            raise ValueError(f"temperature must be positive and at most a million, not {self.temperature!r}")
        if self.retrieval not in RETRIEVALS:
            raise ValueError(f"retrieval must be one of {', '.join(RETRIEVALS)}, not {self.retrieval!r}")
        if self.carriers and (self.grid[2] != 1 or self.retrieval != "temperature"):
            raise ValueError("carriers carry all of time: they need a grid with one anchor in t, and no LAL retrieval")
        if self.carriers > 2048:  # their numbers are stored in half precision
            raise ValueError(f"at most 2048 carriers are possible, not {self.carriers}")
        if self.carriers and not (self.switches <= min(4, self.token_dim - 2) and self.amplitudes % 2 == 0):
            raise ValueError(f"switches must be at most 4 and leave an even number of values, not {self.switches}")
        if self.carriers and (self.cell % 2 or self.tokens % 2 or self.mixer_width % MIXER_HEAD_DIM):
            raise ValueError(
                f"carriers need an even cell side, an even number of tokens and a mixer_width that is a multiple of "
                f"{MIXER_HEAD_DIM}, not {self.cell}, {self.tokens} and {self.mixer_width}"
            )
        if not 0 <= self.lal_threshold < 1:
            raise ValueError(f"lal_threshold must be in [0, 1), not {self.lal_threshold!r}")

    @property
    def tokens(self) -> int:
        """N, tokens per cell and clip."""
        return math.prod(self.grid)

    @property
    def amplitudes(self) -> int:
        """Values of a token that are no switches."""
        return self.token_dim - (self.switches if self.carriers else 0)

    @property
    def modes(self) -> int:
        """What a token's switches can say: a set of waves, and whether it lends."""
        return 2**self.switches if self.carriers else 1

    @property
    def sets(self) -> int:
        """Sets of waves that a token's amplitudes may stand for."""
        return self.modes // 2

    @property
    def cross(self) -> bool:
        """Whether the token former attends to patches, as the paper's does; with carriers its queries see the analysis."""
        return not self.carriers

    @property
    def patches(self) -> int:
        """N_p, patch tokens per cell and clip."""
        return self.frames * (self.cell // self.patch) ** 2

    @property
    def hints(self) -> Hints:
        """What the entropy coder should know of the tokens: their grid, and the switches that come last with carriers."""
        return Hints(self.grid[0], tuple(range(self.amplitudes, self.token_dim)))

    @property
    def spatial_frequencies(self) -> int:
        """k_s = 4k/3."""
        return 4 * self.frequencies // 3

    @property
    def temporal_frequencies(self) -> int:
        """k_t = 3k - 2 k_s."""
        return 3 * self.frequencies - 2 * self.spatial_frequencies

    @property
    def gamma_dim(self) -> int:
        """Features of one encoded coordinate."""
        return 6 * self.frequencies

    def to_json(self) -> str:
        """Return the configuration as a JSON object, fields in order."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Config":
        """Parse what `to_json` wrote; ValueError says what is wrong with anything else."""
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("the configuration is nested too deeply") from error
        if not isinstance(data, dict):
            raise ValueError("the configuration is not a JSON object")
        known = {f.name: f.type for f in dataclasses.fields(Config)}
        if unknown := sorted(set(data) - set(known)):
            raise ValueError(f"unknown configuration field {unknown[0]!r} (made by a newer version?)")
        if isinstance(data.get("grid"), list):
            data["grid"] = tuple(data["grid"])
        for name, value in data.items():
            kind = known[name]
            if kind in (bool, str) and type(value) is not kind:
                raise ValueError(f"{name} must be of type {kind.__name__}")
            if kind is float and type(value) not in (int, float):
                raise ValueError(f"{name} must be a number")
        return Config(**data)


def _paper(grid: tuple[int, int, int], frames: int) -> Config:
    return Config(frames=frames, cell=256, grid=grid, width=768, depth=6, heads=6, head_dim=64, feed_forward=3072)


# The paper's S/M/L differ in N (384/512/768) and each is run with F = 4, 8 and 16.
_PAPER_GRIDS = {"paper-s": (16, 12, 2), "paper-m": (16, 16, 2), "paper-l": (16, 12, 4)}

_TINY = {"cell": 32, "width": 64, "depth": 1, "heads": 2, "head_dim": 32, "feed_forward": 64, "decoder_heads": 2}

PRESETS: dict[str, Config] = {
    # What we train and ship: the paper's token budget in small cells, and tokens that modulate carriers.
    "base": Config(
        grid=(8, 12, 1),
        depth=2,
        carriers=280,
        switches=4,
        luma_functions=96,
        chroma_functions=56,
        temperature=0.04,
        mixer_depth=3,
        mlp_hidden=32,
        decoder_heads=2,
    ),
    # As small as still runs every line: for tests and for trying the trainer out.
    "tiny": Config(
        **_TINY, grid=(2, 3, 1), carriers=176, temperature=0.04, mlp_hidden=16, mixer_depth=1, mixer_width=32
    ),
    "tiny-paper": Config(**_TINY, grid=(2, 2, 1)),
}
for _name, _grid in _PAPER_GRIDS.items():
    PRESETS[_name] = _paper(_grid, 8)
    for _frames in (4, 8, 16):
        PRESETS[f"{_name}-f{_frames}"] = _paper(_grid, _frames)
