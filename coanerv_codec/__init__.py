"""CoANeRV: a neural video codec whose decoder is a function of coordinates.

    import coanerv_codec as coa

    coa.encode("in.mp4", "clip.coa", bits=6)
    for picture in coa.decode("clip.coa"):      # RGB, uint8 [H, W, 3]
        ...
    with coa.open("clip.coa") as clip:
        clip.tokens(0)                          # float32 [cells, N, d]
        clip.query(x=0.5, y=0.5, t=0.2)         # any point, any time

Nothing heavy is imported before it is used.
"""

from coanerv_codec.version import __version__

__all__ = ["__version__", "decode", "encode", "open"]


def __getattr__(name: str):
    if name in ("encode", "decode", "open"):
        from coanerv_codec import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
