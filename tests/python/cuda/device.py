"""What the device tests share: kernels compiled from the repository's sources, poisoned buffers, timing, and a table."""

import pathlib
import sys
import time

import cupy
import numpy

SOURCES = pathlib.Path(__file__).resolve().parents[3] / "kernels" / "cuda"
POISON = 0xA5A5A5A5


def kernels(name):
    """The module `name`.cu. What it includes is pasted in, so that the compiler needs no path."""
    text = (SOURCES / f"{name}.cu").read_text()
    shared = (SOURCES / "common.cuh").read_text().replace("#pragma once", "")
    return cupy.RawModule(code=text.replace('#include "common.cuh"', shared), options=("-std=c++17",))


def poisoned(shape, dtype):
    """A buffer whose every word is POISON."""
    dtype = numpy.dtype(dtype)
    words = int(numpy.prod(shape)) * dtype.itemsize // 4
    return upload(numpy.full(words, POISON, numpy.uint32).view(dtype).reshape(shape))


def upload(array):
    return cupy.asarray(numpy.ascontiguousarray(array))


def download(array):
    return cupy.asnumpy(array)


def bits(array):
    """Words, to compare NaN and padding as well."""
    return numpy.ascontiguousarray(array).view(numpy.uint32)


def untouched(array):
    return bool((bits(array) == POISON).all())


def header(samples, token_logits=0, rows=None):
    """`Header` of common.cuh."""
    words = numpy.zeros(16, numpy.uint32)
    words[0], words[1], words[4] = rows or samples, samples, token_logits
    return upload(words)


def microseconds(launch, repeats=20, replays=50):
    """Median time of `launch` on a stream, from replays of a graph that holds it `repeats` times."""
    cupy.cuda.Device().synchronize()  # the uploads went another way
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        launch()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(repeats):
            launch()
        graph = stream.end_capture()
        times = []
        for replay in range(replays + 5):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            if replay >= 5:
                times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / repeats)
    return float(numpy.median(times))


def new_seed():
    """From the command line, or else from the clock; printed, so that a failure can be repeated."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else time.time_ns() % 2**32
    print(f"seed {seed}", flush=True)
    return seed


class Report:
    """Counts checks, keeps the first failures, and prints a table at the end."""

    def __init__(self):
        self.rows, self.failures, self.checks = [], 0, 0

    def check(self, holds, message):
        self.checks += 1
        if not holds:
            self.failures += 1
            if self.failures <= 40:
                print(f"FAILED: {message}", flush=True)

    def row(self, name, value):
        self.rows.append((name, value))

    def finish(self):
        width = max(len(name) for name, _ in self.rows) if self.rows else 0
        for name, value in self.rows:
            print(f"{name:<{width}}  {value}")
        print(f"{self.checks} checks, {self.failures} failed")
        sys.exit(self.failures > 0)
