"""The results of `coanerv bench` for people: tables for the terminal, and the same as Markdown for docs/performance.md."""

Rows = list[tuple[str, ...]]


def tables(result: dict) -> list[tuple[str, tuple[str, ...], Rows]]:
    """Render a result as tables: title, headings, rows of text."""
    return [
        ("Run", ("", ""), _facts(result)),
        (
            "Decoding engines",
            ("model", "N", "engine", "fps", "kpx/s", "kFLOP/px", "of peak", "max diff"),
            [
                (
                    *(e["preset"], str(e["tokens"]), f"{e['engine']} {e['precision']}"),
                    *(f"{e['fps']:.3g}", f"{e['kpx_per_s']:,.0f}", f"{e['flop_per_pixel'] / 1e3:.1f}"),
                    *(f"{e['share_of_gemm_peak']:.0%}", f"{e['max_abs_diff']:.1e}"),
                )
                for e in result["decode"]
            ],
        ),
        ("Codecs", ("codec", "encode fps", "decode fps", "bytes"), _codecs(result)),
        (
            f"Memory of decoding, MiB, tile {result['memory']['tile']}",
            ("picture", "peak", "frames in flight", "all else"),
            [
                (name, *(f"{m[k]:.0f}" for k in ("peak_rss_mb", "frames_in_flight_mb", "apart_mb")))
                for name, m in result["memory"].items()
                if name != "tile"
            ],
        ),
        ("Against the targets", ("target", "here", ""), _targets(result)),
    ]


def _facts(result: dict) -> Rows:
    s, m, peak, encode = (result[k] for k in ("settings", "machine", "gemm_peak", "encode"))
    rows = [
        (
            "pictures",
            f"{s['frames']} of {s['width']}x{s['height']} ({s['source']}), {s['cells']} cells, tile {s['tile']}",
        ),
        ("checkpoint", s["checkpoint"]),
        ("machine", f"{m['cpu']}, {m['threads']} of {m['cores']} cores, {m['instructions']}, torch {m['torch']}"),
        ("load before the run", f"{m['load_before']:.1f}"),
        *((f"GEMM peak, {p}", f"{peak[p]:.0f} GFLOPS") for p in ("fp32", "bf16") if p in peak),
        ("times", f"median of {s['repeats']} after {s['warmup']} warm-up, in turns; files {_times(result)}"),
        ("token extraction", f"{encode['token_extraction_fps']:.3g} fps"),
        ("encoding 8x256x256 to tokens", f"{encode['clip_256_ms']:.0f} ms"),
        ("the same without looking for motion", f"{encode['clip_256_without_motion_ms']:.0f} ms"),
        ("decoding engine on the file", f"{result['end_to_end']['engine_fps']:.3g} fps"),
        ("bf16, largest error", f"{result['bf16_error']['max_abs_diff'] * 255:.2f}/255"),
    ]
    return rows


def _times(result: dict) -> str:
    return f"of {result['end_to_end']['repeats']}, other codecs once"


def _codecs(result: dict) -> Rows:
    rows = [
        (
            "coanerv, file to file",
            *(f"{v:.3g}" for v in (result["encode"]["full_fps"], result["end_to_end"]["fps"])),
            f"{result['encode']['bytes']:,}",
        )
    ]
    for codec in result["codecs"]:
        name = f"{codec['codec']} ({codec['settings']})"
        if "missing" in codec:
            rows.append((name, codec["missing"], "", ""))
        else:
            speeds = (f"{codec[k]:.3g}" for k in ("encode_fps", "decode_fps"))
            rows.append((name, *speeds, f"{codec['bytes']:,}"))
    return rows


def _targets(result: dict) -> Rows:
    """State what was aimed at (issue 3) and what this run gave; a target that was not measured is left out."""
    ratios, peak = result["ratios"], result["gemm_peak"]
    rows: Rows = []

    def add(target: str, here: str, met: bool) -> None:
        rows.append((target, here, "met" if met else "not met"))

    for name, least in (("fp32 to reference", 5), ("bf16 to reference", 8), ("fp32 to paper-s reference", 20)):
        if (ratio := ratios.get(f"separable {name}")) is not None:
            add(f"separable {name}, at least {least}x", f"{ratio:.1f}x", ratio >= least)
    if "bf16" not in peak:
        rows.append(("separable bf16 to reference, at least 8x", "no bf16 instructions here", "not measured"))
    elif peak["bf16"] < peak["fp32"]:
        slower = f"bf16 products are slower than fp32 here: {peak['bf16']:.0f} against {peak['fp32']:.0f} GFLOPS"
        rows.append(("", slower, ""))
    fast = next((e for e in result["decode"] if e["engine"] == "separable" and e["precision"] == "fp32"), None)
    if fast:
        share = fast["share_of_gemm_peak"]
        add("separable fp32, at least 75% of the GEMM peak", f"{share:.0%}", share >= 0.75)
    reading, ratio = result["end_to_end"]["reading_share"], ratios["end-to-end decode to engine"]
    add("reading and entropy decoding, under 3% of decoding", f"{reading:.1%}", reading < 0.03)
    add("end-to-end decode, at least 85% of the engine's speed", f"{ratio:.0%}", ratio >= 0.85)
    ratio = ratios["memory at 4K to 1080p, without frames in flight"]
    add("memory at 4K within 10% of 1080p, without frames in flight", f"{ratio - 1:+.0%}", abs(ratio - 1) <= 0.1)
    clip = result["encode"]["clip_256_ms"]
    add("encoding 8x256x256 to tokens, under 60 ms", f"{clip:.0f} ms", clip < 60)
    return rows


def markdown(result: dict) -> str:
    """Render a result as Markdown tables, as docs/performance.md holds them."""
    parts = []
    for title, headings, rows in tables(result):
        lines = [f"### {title}", "", "| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
        parts.append("\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]))
    return "\n\n".join(parts) + "\n"
