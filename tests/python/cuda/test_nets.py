"""Kernels of router networks against references in float64. Needs a GPU, cupy and numpy.

    python3 tests/python/cuda/test_nets.py [SEED]
"""

import itertools
import math

import numpy

import device
from device import Report, bits, download, header, kernels, new_seed, poisoned, untouched, upload

PAGE, LIST, THREADS = 16, 128, 256
NULL = numpy.uint64(0)
ACTIVATIONS = ("gelu", "silu", "relu", "tanh", "sigmoid")
NAMES = (
    "linear", "norm", "activation", "softmax", "add", "copy", "embedding_f32", "embedding_packed", "hidden_back",
    "top_logits", "top", "scores",
)
u32, f32, f64 = numpy.uint32, numpy.float32, numpy.float64


def packed(table):
    """`table` [outputs, inputs] as `packed_index` of common.cuh lays it out; the last tile is filled with zeros."""
    outputs, inputs = table.shape
    whole = numpy.zeros((-(-outputs // 16) * 16, inputs), table.dtype)
    whole[:outputs] = table
    # output = (tile, half, row), input = (tile, lane, number)
    return whole.reshape(-1, 2, 8, inputs // 32, 4, 8).transpose(0, 3, 1, 2, 4, 5).reshape(-1)


def blocks(width):
    return -(-width // THREADS)


def activate(kind, x):
    x = x.astype(f64)
    return {
        "gelu": lambda: x * 0.5 * (1.0 + numpy.vectorize(math.erf)(x / math.sqrt(2.0))),
        "silu": lambda: x / (1.0 + numpy.exp(-x)),
        "relu": lambda: numpy.where(x < 0.0, 0.0, x),
        "tanh": lambda: numpy.tanh(x),
        "sigmoid": lambda: 1.0 / (1.0 + numpy.exp(-x)),
    }[kind]()


def norm(x, weight, bias, eps):
    x = x.astype(f64)
    if bias is not None:
        x = x - x.mean(axis=1, keepdims=True)
    scaled = x / numpy.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight
    return scaled if bias is None else scaled + bias


def largest(row, count):
    """The `count` largest above -inf, NaN where there are fewer."""
    values = numpy.sort(row[row > -numpy.inf])[::-1][:count]
    return numpy.concatenate([values, numpy.full(count - len(values), numpy.nan)])


def sample_out(tokens, finite):
    """`SampleOut` of slots with these tokens; what nets don't read is poison."""
    words = numpy.full((len(tokens), 8), device.POISON, u32)
    words[:, 0], words[:, 1] = tokens, finite
    return upload(words)


class Nets:
    """Every check runs its kernel over `samples` of `slots` slots, into columns of a wider buffer."""

    def __init__(self, report, random):
        module = kernels("nets")
        self.kernels = {name: module.get_function(f"net_{name}") for name in NAMES}
        self.report, self.random = report, random
        self.worst = {}

    def normal(self, *shape, scale=1.0):
        return (self.random.standard_normal(shape) * scale).astype(f32)

    def rows(self, slots, width, pitch, scale=1.0):
        """Values [slots, width] on the host, and on the device in a buffer that is NaN elsewhere."""
        values = self.normal(slots, width, scale=scale)
        padded = numpy.full((slots, pitch), numpy.nan, f32)
        padded[:, :width] = values
        return values, upload(padded)

    def check(self, name, samples, width, want, launch, relative=2e-6, absolute=2e-6):
        """`launch(out, out_pitch, samples)` with `out` on columns 3.. of a poisoned buffer; then each slot alone."""
        slots = len(want)
        pitch = width + int(self.random.integers(4, 9))
        whole = poisoned((slots, pitch), f32)
        launch(whole.ravel()[3:], pitch, samples, 0)
        whole = download(whole).reshape(slots, pitch)
        got = whole[:, 3:3 + width]
        self.report.check(untouched(got[samples:]), f"{name}: slots beyond the samples were written")
        outside = untouched(whole[:, :3]) and untouched(whole[:, 3 + width:])
        self.report.check(outside, f"{name}: columns outside of its own were written")
        got, want = got[:samples], want[:samples]
        self.report.check((numpy.isnan(got) == numpy.isnan(want)).all(), f"{name}: NaN in other places")
        with numpy.errstate(invalid="ignore"):
            off = numpy.abs(got - want) / (numpy.abs(want) * relative + absolute)
        off[got == want] = 0.0
        off = float(numpy.nan_to_num(off, nan=0.0, posinf=1e30).max())
        kind = name.split(",")[0]
        self.worst[kind] = max(self.worst.get(kind, 0.0), off)
        self.report.check(off <= 1.0, f"{name}: off by {off:.1f} tolerances")
        slot = int(self.random.integers(samples))
        alone = poisoned((1, pitch), f32)
        launch(alone.ravel()[3:], pitch, 1, slot)
        same = (bits(download(alone).reshape(1, pitch)[0]) == bits(whole[slot])).all()
        self.report.check(same, f"{name}: a slot alone differs from itself in company")

    # `first` is the slot that a launch begins with: 0 for all, and the one that is computed alone.

    def linear(self, samples, slots, inputs, outputs, with_bias):
        x_pitch = inputs + int(self.random.choice([0, 4, 3]))
        x, on_device = self.rows(slots, inputs, x_pitch)
        weight, bias = self.normal(outputs, inputs, scale=inputs**-0.5), self.normal(outputs)
        want = x.astype(f64) @ weight.astype(f64).T + (bias if with_bias else 0.0)
        weight, bias = upload(weight), upload(bias)

        def launch(out, pitch, samples, first):
            self.kernels["linear"](
                (-(-outputs // 8),), (THREADS,),
                (header(samples), weight, bias if with_bias else NULL, on_device[first:], u32(x_pitch), u32(inputs),
                 u32(outputs), out, u32(pitch)),
            )

        self.check(f"linear, {samples} x {inputs} to {outputs}", samples, outputs, want, launch, 1e-5, 1e-5)

    def norms(self, samples, slots, width, centred):
        x, on_device = self.rows(slots, width, width + 5)
        x += f32(2.0)
        on_device += f32(2.0)
        weight, bias, eps = self.normal(width), self.normal(width), f32(self.random.choice([1e-6, 1e-5]))
        want = norm(x, weight, bias if centred else None, float(eps))
        weight, bias = upload(weight), upload(bias)

        def launch(out, pitch, samples, first):
            self.kernels["norm"](
                (slots,), (THREADS,),
                (header(samples), u32(centred), weight, bias if centred else NULL, eps, on_device[first:],
                 u32(width + 5), u32(width), out, u32(pitch)),
            )

        name = "layer norm" if centred else "rms norm"
        self.check(f"{name}, width {width}", samples, width, want, launch, 1e-5, 1e-5)

    def activations(self, samples, slots, width):
        x, on_device = self.rows(slots, width, width + 1, scale=4.0)
        on_device[0, :3] = upload(numpy.array([numpy.nan, -200.0, 200.0], f32))
        x[0, :3] = [numpy.nan, -200.0, 200.0]
        for kind, name in enumerate(ACTIVATIONS):
            def launch(out, pitch, samples, first, kind=kind):
                self.kernels["activation"](
                    (blocks(width), slots), (THREADS,),
                    (header(samples), u32(kind), on_device[first:], u32(width + 1), u32(width), out, u32(pitch)),
                )

            self.check(name, samples, width, activate(name, x), launch)

    def softmax(self, samples, slots, width):
        x, on_device = self.rows(slots, width, width + 2, scale=5.0)
        e = numpy.exp(x.astype(f64) - x.max(axis=1, keepdims=True))

        def launch(out, pitch, samples, first):
            self.kernels["softmax"](
                (slots,), (THREADS,),
                (header(samples), on_device[first:], u32(width + 2), u32(width), out, u32(pitch)),
            )

        self.check(f"softmax, width {width}", samples, width, e / e.sum(axis=1, keepdims=True), launch, 1e-5, 1e-7)

    def add_and_copy(self, samples, slots, width):
        (a, a_device), (b, b_device) = self.rows(slots, width, width), self.rows(slots, width, width + 3)
        constant = self.normal(width)
        constant_device = upload(constant)
        grid = (blocks(width), slots)

        def add(out, pitch, samples, first):
            self.kernels["add"](
                grid, (THREADS,),
                (header(samples), a_device[first:], u32(width), b_device[first:], u32(width + 3), u32(width), out,
                 u32(pitch)),
            )

        def add_in_place(out, pitch, samples, first):
            copy(out, pitch, samples, first)
            self.kernels["add"](
                grid, (THREADS,),
                (header(samples), out, u32(pitch), a_device[first:], u32(width), u32(width), out, u32(pitch)),
            )

        def copy(out, pitch, samples, first):
            self.kernels["copy"](
                grid, (THREADS,),
                (header(samples), b_device[first:], u32(width + 3), u32(width), out, u32(pitch)),
            )

        def broadcast(out, pitch, samples, first):
            self.kernels["copy"](
                grid, (THREADS,), (header(samples), constant_device, u32(0), u32(width), out, u32(pitch))
            )

        self.check("add", samples, width, a + b, add, 0.0, 1e-30)
        self.check("add in place", samples, width, b + a, add_in_place, 0.0, 1e-30)
        self.check("copy", samples, width, b, copy, 0.0, 1e-30)
        self.check("constant", samples, width, numpy.tile(constant, (slots, 1)), broadcast, 0.0, 1e-30)

    def embedding(self, samples, slots, width):
        vocab = 50
        table = self.normal(vocab, width)
        short = (bits(table) >> 16).astype(numpy.uint16)
        tokens = self.random.integers(0, vocab, slots)
        forms = [("f32", table, table)]
        if width % 32 == 0:  # whole tiles
            forms.append(("packed", packed(short), (short.astype(u32) << 16).view(f32)))
        for name, stored, exact in forms:
            on_device, samples_device = upload(stored), sample_out(tokens, 1)

            def launch(out, pitch, samples, first, name=name, on_device=on_device, samples_device=samples_device):
                self.kernels[f"embedding_{name}"](
                    (blocks(width), slots), (THREADS,),
                    (header(samples), samples_device[first:], on_device, u32(width), out, u32(pitch)),
                )

            self.check(f"embedding {name}", samples, width, exact[tokens], launch, 0.0, 1e-30)

    def hidden_back(self, samples, slots, hidden):
        rows, pages, stride = slots + 3, 40, 12
        states = self.normal(pages, PAGE, hidden)
        positions = self.random.integers(0, 5 * PAGE, rows)
        positions[0] = 0
        starts = self.random.integers(0, 30, rows)
        page_list = self.random.integers(0, pages, 40)
        of_slot = self.random.permutation(rows)[:slots]
        of_slot[0] = 0
        words = numpy.full((slots, stride), device.POISON, u32)
        words[:, 0] = of_slot
        buffers = [upload(a.astype(u32)) for a in (positions, starts, page_list)]
        on_device, words = upload(states), upload(words)
        for back in (0, 1, 2, 17):
            want = numpy.zeros((slots, hidden), f32)
            for slot, row in enumerate(of_slot):
                at = int(positions[row]) - back
                if at >= 0:
                    want[slot] = states[page_list[starts[row] + at // PAGE], at % PAGE]

            def launch(out, pitch, samples, first, back=back):
                self.kernels["hidden_back"](
                    (blocks(hidden), slots), (THREADS,),
                    (header(samples), words[first:], u32(stride), u32(back), *buffers, on_device, u32(hidden), out,
                     u32(pitch)),
                )

            self.check("hidden back", samples, hidden, want, launch, 0.0, 1e-30)

    def top(self, samples, slots, width, count):
        x, _ = self.rows(slots, width, width)
        x[0] = numpy.round(x[0])  # ties
        if slots > 1:
            x[1, self.random.random(width) < 0.9] = -numpy.inf
        if slots > 2:
            x[2, self.random.integers(width)] = numpy.nan
        on_device = upload(x)

        def launch(out, pitch, samples, first):
            self.kernels["top"](
                (blocks(max(width, count)), slots), (THREADS,),
                (header(samples), on_device[first:], u32(width), u32(width), u32(count), out, u32(pitch)),
            )

        want = numpy.stack([largest(row, count) for row in x])
        self.check(f"top, {count} of {width}", samples, count, want, launch, 0.0, 1e-30)

    def top_logits_and_scores(self, samples, slots, count):
        values = -numpy.sort(-self.normal(slots, LIST))
        values[0, count // 2:] = -numpy.inf
        values_device = upload(values)
        finite = self.random.integers(0, 2, slots)
        finite[0] = 0
        outs = sample_out(numpy.zeros(slots, u32), finite)
        grid = (blocks(count), slots)

        def top(out, pitch, samples, first):
            self.kernels["top_logits"](
                grid, (THREADS,), (header(samples), values_device[first:], u32(count), out, u32(pitch))
            )

        def scores(out, pitch, samples, first):
            self.kernels["scores"](
                grid, (THREADS,),
                (header(samples), outs[first:], values_device[first:], u32(LIST), u32(count), out, u32(pitch)),
            )

        listed = numpy.where(values == -numpy.inf, numpy.nan, values)[:, :count]
        self.check("top logits", samples, count, listed, top, 0.0, 1e-30)
        scored = numpy.where(finite[:, None] == 1, values, numpy.nan)[:, :count].astype(f32)
        self.check("scores", samples, count, scored, scores, 0.0, 1e-30)

    def time_all(self):
        """R2R's layers at the width of Qwen3-0.6B, and a head on Qwen3-32B."""
        for (inputs, outputs), slots in itertools.product(
            ((1024, 1024), (1024, 4096), (4096, 1024), (5120, 1), (5120, 256)), (1, 8, 32)
        ):
            x, weight = upload(self.normal(slots, inputs)), upload(self.normal(outputs, inputs))
            bias, out, head = upload(self.normal(outputs)), poisoned((slots, outputs), f32), header(slots)

            def launch():
                self.kernels["linear"](
                    (-(-outputs // 8),), (THREADS,),
                    (head, weight, bias, x, u32(inputs), u32(inputs), u32(outputs), out, u32(outputs)),
                )

            time = device.microseconds(launch)
            bandwidth = inputs * outputs * 4 / time / 1e6
            self.report.row(f"linear {inputs} to {outputs}, {slots} rows", f"{time:.1f} us, {bandwidth:.2f} TB/s of weights")
        for slots in (1, 8):
            x, out, head = upload(self.normal(slots, 1024)), poisoned((slots, 1024), f32), header(slots)
            weight = upload(self.normal(1024))
            shape = (u32(1024), u32(1024), out, u32(1024))
            cases = {
                "layer norm": ("norm", (slots,), (head, u32(1), weight, weight, f32(1e-5), x, *shape)),
                "gelu": ("activation", (4, slots), (head, u32(0), x, *shape)),
                "softmax": ("softmax", (slots,), (head, x, *shape)),
                "top": ("top", (4, slots), (head, x, u32(1024), u32(1024), u32(100), out, u32(1024))),
            }
            for name, (kernel, grid, arguments) in cases.items():
                def launch(kernel=kernel, grid=grid, arguments=arguments):
                    self.kernels[kernel](grid, (THREADS,), arguments)

                self.report.row(f"{name} of 1024, {slots} rows", f"{device.microseconds(launch):.1f} us")


def main():
    random = numpy.random.default_rng(new_seed())
    report = Report()
    nets = Nets(report, random)
    for samples in (1, 2, 3, 7, 8, 13, 31):
        slots = samples + int(random.integers(0, 3))
        for (inputs, outputs), bias in itertools.product(((1024, 300), (1023, 9), (4, 1), (5, 8), (130, 65)), (0, 1)):
            nets.linear(samples, slots, inputs, outputs, bias)
        for width in (1, 64, 1000, 4096):
            nets.norms(samples, slots, width, 0)
            if width > 1:
                nets.norms(samples, slots, width, 1)
            nets.softmax(samples, slots, width)
        for width in (7, 256, 300):
            nets.activations(samples, slots, width)
            nets.add_and_copy(samples, slots, width)
            nets.embedding(samples, slots, width)
            nets.hidden_back(samples, slots, width)
        for width, count in ((1, 1), (10, 10), (300, 100), (1024, 1024), (20, 30)):
            nets.top(samples, slots, width, count)
        for count in (1, 20, 128):
            nets.top_logits_and_scores(samples, slots, count)
    for kind, off in nets.worst.items():
        report.row(kind, f"off by {off:.2f} tolerances")
    nets.time_all()
    report.finish()


if __name__ == "__main__":
    main()
