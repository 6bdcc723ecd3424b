"""Encode and decode a long video under a memory limit, watch the memory, and draw it.

    python tests/long_run.py --minutes 60 --plot docs/long-run.svg

Not part of the suite: an hour of video takes an hour or so. A short video is first done without a limit; what that took of
address space, plus a margin, is the limit (RLIMIT_AS) of the long one. The slope of the resident memory after the
warm-up is printed in bytes per hour of video. Beside the plot a .json holds every sample.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from conftest import local_model

import coanerv_codec
from coanerv_codec.checkpoint import save_checkpoint
from coanerv_codec.curves import Chart, svg

WIDTH, HEIGHT, RATE, SOUND = 96, 64, 25, 48000
SHORT = 8  # seconds of the video that sets the limit: several clips, so that everything is loaded
WARM_UP = 0.05  # share of the run that is left out of the slope: libraries load at their own pace on busy cores


def make_long_video(path: Path, seconds: int) -> None:
    """Moving waves whose speed and direction change, with a tone; written as it is made."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    with av.open(str(path), "w") as out:
        size = {"width": WIDTH, "height": HEIGHT}
        video = out.add_stream("libx264", rate=RATE, pix_fmt="yuv420p", options={"preset": "ultrafast"}, **size)
        sound = out.add_stream("aac", rate=SOUND, layout="mono")
        for second in range(seconds):
            for number in range(second * RATE, (second + 1) * RATE):
                frame = av.VideoFrame(WIDTH, HEIGHT, "yuv420p")
                phase = number / 9 + 5 * np.sin(number / 200)
                for index, plane in enumerate(frame.planes):
                    rows = np.frombuffer(plane, np.uint8).reshape(plane.height, -1)
                    step = 1 if index == 0 else 2
                    wave = 128 + 90 * np.sin(x / 11 + phase + index) * np.cos(y / 8 - phase / 3)
                    rows[:, : plane.width] = wave[::step, ::step]
                frame.pts, frame.time_base = number, Fraction(1, RATE)
                out.mux(video.encode(frame))
            at = np.arange(second * SOUND, (second + 1) * SOUND)
            samples = av.AudioFrame.from_ndarray(np.sin(at / 20).astype(np.float32)[None], "fltp", "mono")
            samples.sample_rate, samples.pts = SOUND, second * SOUND
            out.mux(sound.encode(samples))
        out.mux(sound.encode(None))
        out.mux(video.encode(None))


def watch(arguments: list[object], limit: int | None) -> tuple[list[tuple[float, float]], int]:
    """Run a command; returns (seconds, resident MB) once a second, and the peak of its address space in bytes."""
    environment = {**os.environ, "PYTHONPATH": str(Path(coanerv_codec.__file__).parents[1])}
    limited = (lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))) if limit else None
    command = [sys.executable, "-m", "coanerv_codec", *map(str, arguments), "-y", "-q"]
    began = time.monotonic()
    child = subprocess.Popen(command, env=environment, preexec_fn=limited)
    samples, peak = [], 0
    while child.poll() is None:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{child.pid}/status").read_text().splitlines())
        if "VmRSS" in fields:  # a process that ends has none any more
            peak = max(peak, int(fields["VmPeak"].split()[0]) * 1024)
            samples.append((time.monotonic() - began, int(fields["VmRSS"].split()[0]) / 1024))
        time.sleep(1 if limit else 0.05)
    if child.returncode:
        sys.exit(f"{' '.join(command)} ended with {child.returncode}")
    return samples, peak


def slope(samples: list[tuple[float, float]]) -> float:
    """MB per second of the run, by least squares."""
    seconds, megabytes = np.array(samples).T
    return float(np.polyfit(seconds, megabytes, 1)[0])


def main() -> None:
    """Do the two commands, short and long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="length of the video")
    parser.add_argument("--margin", type=int, default=64, help="MB of address space more than the short video takes")
    parser.add_argument("--suffix", default=".mkv", help="of the decoded video; MP4 keeps a table of all packets")
    parser.add_argument("--tiny", action="store_true", help="an untrained tiny model instead of the shipped one")
    parser.add_argument("--plot", type=Path, default=Path("docs/long-run.svg"))
    options = parser.parse_args()
    runs: dict[str, dict] = {"encode": {}, "decode": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = ["--checkpoint", save_checkpoint(local_model(), folder, "tiny")] if options.tiny else []
        limits = {}
        for length, seconds in (("short", SHORT), ("long", round(60 * options.minutes))):
            source, coa, result = (folder / f"{length}{suffix}" for suffix in (".mp4", ".coa", options.suffix))
            make_long_video(source, seconds)
            jobs = {"encode": ["encode", source, "-o", coa, "--fit"], "decode": ["decode", coa, "-o", result]}
            for job, arguments in jobs.items():
                samples, peak = watch([*arguments, *model], limits.get(job))
                if length == "short":
                    limits[job] = peak + options.margin * 2**20
                    continue
                took = samples[-1][0]
                warm = [sample for sample in samples if sample[0] >= WARM_UP * took]
                growth = slope(warm) * took / options.minutes * 60
                runs[job] = {
                    "limit_mb": round(limits[job] / 2**20),
                    "seconds": round(took),
                    "warm_up_seconds": round(WARM_UP * took),
                    "rss_mb_min": round(min(rss for _, rss in warm), 1),
                    "rss_mb_max": round(max(rss for _, rss in warm), 1),
                    "growth_mb_per_hour_of_video": round(growth, 2),
                }
                print(f"{job}: {runs[job]}", flush=True)
                runs[job]["samples"] = [(round(at, 1), round(rss, 1)) for at, rss in samples]
        frames = [count_frames(path) for path in (source, result)]
        print(f"{frames[0]} frames in, {frames[1]} out; {coa.stat().st_size:,} bytes of .coa")
        assert frames[0] == frames[1] == round(60 * options.minutes) * RATE
    lines = {f"{job}, MB of {run['limit_mb']} allowed": run["samples"] for job, run in runs.items()}
    charts = [Chart(f"resident memory: {name}", "seconds", {"": line}) for name, line in lines.items()]
    options.plot.write_text(svg([Chart(c.title, c.x_label, {**c.lines, " ": [(0, 0)]}) for c in charts]))
    content = {"minutes_of_video": options.minutes, "frames": frames[1], "tiny": options.tiny, **runs}
    options.plot.with_suffix(".json").write_text(json.dumps(content) + "\n")


def count_frames(path: Path) -> int:
    """Decode a video and count."""
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


if __name__ == "__main__":
    main()
