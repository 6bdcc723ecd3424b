"""Print how far apart thread counts, engines, tiles and precisions are with the shipped checkpoint.

python tests/measure_determinism.py
"""

import numpy as np
from test_determinism import clips, encode, symbols, threads

from coanerv_codec.checkpoint import find_checkpoint, load_checkpoint
from coanerv_codec.decoding import EngineOptions, clip_tokens, decode_clip, layout_of, make_view
from coanerv_codec.demo import bundled_clip
from coanerv_codec.video import open_video


def main() -> None:
    """Encode two clips of 384x256 with 1 to 4 threads, and decode a part of the first in several ways."""
    checkpoint = load_checkpoint(find_checkpoint())
    with open_video(bundled_clip(), audio=False) as video:
        pictures = [np.ascontiguousarray(frame.yuv[:, :256, :384]) for frame, _ in zip(video, range(16), strict=False)]
    files = []
    for count in (1, 2, 3, 4):
        with threads(count):
            files.append(encode(pictures, checkpoint))
        changed = np.abs(symbols(files[-1]) - symbols(files[0]))
        same = "the same" if files[-1] == files[0] else "other"
        print(f"{count} threads: {same} bytes, {(changed > 0).sum()} of {changed.size} symbols differ")
    reader, found = clips(files[0])
    tokens, layout = clip_tokens(found[0], reader.header), layout_of(reader.header, found[0])
    view, t = make_view(384, 256, crop=(100, 60, 128, 96)), np.arange(8, dtype=np.float32) / 8

    def pixels(count: int = 1, **options: object) -> np.ndarray:
        with threads(count):
            return decode_clip(checkpoint.model.decoder, tokens, layout, view, t, EngineOptions(**options)).astype(int)

    expected = pixels()
    for way in ({"precision": "bf16"}, {"tile": 7}, {"count": 2}, {"engine": "reference"}):
        difference = np.abs(pixels(**way) - expected)
        print(f"{way}: at most {difference.max()}, {100 * (difference > 0).mean():.3f} % of the samples differ")


if __name__ == "__main__":
    main()
