"""What is in a `.coa` file and how many bytes each part takes: what `coanerv info` prints. Decodes nothing."""

from typing import BinaryIO

from coanerv_codec import records
from coanerv_codec.bank import parse_bank
from coanerv_codec.container import DEFAULT_LIMITS, FRAMING, SIGNATURE, Reader
from coanerv_codec.records import ClipRecord, Limits, Metadata


def summary(file: BinaryIO, limits: Limits = DEFAULT_LIMITS) -> dict:
    """What a `.coa` file holds and where its bytes go, as JSON values. Damage is listed, not raised."""
    reader = Reader(file, limits, on_damage="skip")
    header = reader.header
    sizes = dict.fromkeys(
        (
            "header",
            "symbols",
            "tables",
            "motion",
            "timestamps",
            "streams",
            "packets",
            "metadata",
            "index",
            "framing",
            "other",
        ),
        0,
    )
    if not reader.damage:  # HEAD has been read before the walk begins; a damaged one counts as such
        sizes["header"] = len(records.header_bytes(header))
        sizes["framing"] = len(SIGNATURE) + FRAMING
    part_of = {b"strm": "streams", b"pckt": "packets", b"meta": "metadata"}
    part_of |= {b"indx": "index", b"TAIL": "index", b"head": "header"}
    clips = frames = packets = moving = 0
    coders, bits, start, end = set(), set(), None, 0
    metadata: dict[str, dict[str, str]] = {scope: {} for scope in records.SCOPES}
    for chunk, item in reader.chunks():
        sizes["framing"] += FRAMING
        if isinstance(item, ClipRecord):
            bank = parse_bank(item.bank, header.bank_shape)
            sizes["symbols"] += bank.coded.symbol_bytes
            sizes["tables"] += len(item.bank) - bank.coded.symbol_bytes
            motion = len(records.motion_bytes(item))
            sizes["motion"] += motion
            sizes["timestamps"] += len(chunk.payload) - len(item.bank) - motion
            moving += len(
                {i for i, velocity in enumerate(item.velocities) if any(velocity)} | {i for i, _ in item.shakes}
            )
            clips, frames = clips + 1, frames + len(item.pts)
            bits.add(bank.bits)
            coders.add(bank.coder)
            start = item.pts[0] if start is None else start
            end = item.pts[-1] + item.last_duration
            continue
        sizes[part_of.get(chunk.kind, "other")] += len(chunk.payload)
        if isinstance(item, Metadata):
            metadata[item.scope].update(item.pairs)
        elif isinstance(item, list):
            packets += len(item)
    sizes["damaged"] = reader.offset - sum(sizes.values())
    return {
        "format": f"{records.MAJOR}.{header.minor}",
        "complete": reader.complete,
        "checkpoint": {"name": header.checkpoint, "sha256": header.checkpoint_sha256.hex()},
        "width": header.width,
        "height": header.height,
        "clips": clips,
        "frames": frames,
        "duration": float((end - (start or 0)) * header.time_base),
        "frame_rate": str(header.frame_rate) if header.frame_rate else None,
        "time_base": str(header.time_base),
        "tokens": {
            "bits": sorted(bits),
            "coders": sorted(coders),
            "frames_per_clip": header.frames_per_clip,
            "per_cell": header.tokens,
            "dim": header.token_dim,
        },
        "cells": {
            "columns": header.columns,
            "rows": header.rows,
            "overlap": header.overlap,
            "size": header.cell_size,
            "moving_share": moving / (clips * header.columns * header.rows) if clips else 0.0,
        },
        "display": {
            "sample_aspect_ratio": str(header.sample_aspect_ratio) if header.sample_aspect_ratio else None,
            "rotation": header.rotation,
            "flip": header.flip,
        },
        "source": {
            "chroma": header.chroma,
            "bit_depth": header.bit_depth,
            "alpha": header.alpha,
            "scan": header.scan,
            "color_range": header.color_range,
            "matrix": header.matrix,
            "primaries": header.primaries,
            "transfer": header.transfer,
            "chroma_location": header.chroma_location,
        },
        "streams": [
            {"index": stream.index, "kind": stream.kind, "codec": stream.codec, "language": stream.language}
            for stream in reader.streams.values()
        ],
        "packets": packets,
        "metadata": metadata,
        "bytes": sizes,
        "damage": [
            {
                "offset": damage.offset,
                "reason": damage.reason,
                "clips": _span(damage.clips),
                "frames": _span(damage.frames),
            }
            for damage in reader.damage
        ],
    }


def _span(numbers: range | None) -> list[int] | None:
    """First and one past the last number lost; None if it is not known how many are."""
    return None if numbers is None else [numbers.start, numbers.stop]
