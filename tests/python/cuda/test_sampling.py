"""Sampling kernels against a reference in float64. Needs a GPU, cupy and numpy.

    python3 tests/python/cuda/test_sampling.py [SEED]
"""

import dataclasses
import itertools
import struct

import numpy

import device
from device import Report, bits, download, header, kernels, new_seed, poisoned, untouched, upload

CHUNK, LIST, NO_TOKEN = 4096, 128, 0xFFFFFFFF
GREEDY, FROM_ALL, FROM_LIST, HOST = range(4)
VOCABS = (256, 2048, 2049, 4096, 32000, 151936, 327680)  # the last is the largest possible
EXACT = ("equal", "zeros")  # rows whose weights are 1
OUT = numpy.dtype(
    [("token", "u4"), ("finite", "u4"), ("logit", "f4"), ("max", "f4"), ("second", "f4"), ("lse", "f4"),
     ("entropy", "f4"), ("reserved", "u4")]
)


@dataclasses.dataclass
class Params:
    mode: int = GREEDY
    inv_temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    masked: tuple = ()
    list: int = 0

    def words(self, row, masked_start):
        low, high = struct.unpack("<II", struct.pack("<d", self.uniform))
        packed = struct.pack(
            "<IIfIffIIIIII", row, self.mode, self.inv_temperature, self.top_k, self.top_p, self.min_p, low, high,
            masked_start, len(self.masked), self.list, 0,
        )
        return numpy.frombuffer(packed, numpy.uint32)


# The reference: the order of steps of `runner/sampler.rs`.

def masked_logits(logits, params):
    logits = logits.copy()
    if params.masked:
        logits[[i for i in params.masked if i < len(logits)]] = -numpy.inf
    return logits


def has_distribution(logits):
    return not (numpy.isnan(logits).any() or (logits == numpy.inf).any() or (logits == -numpy.inf).all())


def statistics(logits):
    """argmax, max, second, log-sum-exp, entropy."""
    argmax = int(numpy.argmax(logits))
    rest = numpy.delete(logits, argmax)
    t = logits[logits > -numpy.inf].astype(numpy.float64) - float(logits[argmax])
    e = numpy.exp(t)
    total = e.sum()
    lse = float(logits[argmax]) + numpy.log(total)
    return argmax, logits[argmax], rest.max(), lse, max(numpy.log(total) - (t * e).sum() / total, 0.0)


def best(logits, count):
    """Ids of the largest above -inf, best first, equal ones by id."""
    order = numpy.argsort(-logits, kind="stable")[:count]
    return order[logits[order] > -numpy.inf]


def pick(ids, weights, uniform):
    total = weights.sum()
    if not total > 0.0:
        return None
    running = numpy.cumsum(weights)
    over = numpy.nonzero((uniform * total < running) & (weights > 0.0))[0]
    return int(ids[over[0] if len(over) else numpy.nonzero(weights)[0][-1]])


def draw(logits, params, uniform, top_p, min_p):
    scaled = (logits - logits.max()) * numpy.float32(params.inv_temperature)
    weights = numpy.exp(scaled.astype(numpy.float64))
    weights[weights < min_p] = 0.0
    ids = numpy.arange(len(logits))
    if params.mode == FROM_LIST:
        ids = best(logits, params.top_k)
        if top_p < 1.0:
            held = numpy.cumsum(weights[ids])
            enough = numpy.nonzero(held >= held[-1] * top_p)[0]
            ids = ids[: enough[0] + 1] if len(enough) else ids
        ids = numpy.sort(ids)
    return pick(ids, weights[ids], uniform)


def possible_tokens(logits, params, rounding=3e-7):
    """The reference's token first, then those that it finds when what the f32 weights round is a little different."""
    top_p, min_p = float(numpy.float32(params.top_p)), float(numpy.float32(params.min_p))
    yield draw(logits, params, params.uniform, top_p, min_p)
    signs = (0.0, -rounding, rounding)
    for u, p, m in itertools.product(signs, signs, signs):
        changed_p = top_p * (1.0 + p) if top_p < 1.0 else top_p
        yield draw(logits, params, min(max(params.uniform + u, 0.0), 1.0), changed_p, min_p * (1.0 + m))


# The kernels.

class Kernels:
    def __init__(self):
        module = kernels("sampling")
        self.logit_chunks, self.sample_rows = (module.get_function(n) for n in ("logit_chunks", "sample_rows"))

    def prepare(self, rows, params, vocab, pitch, slots, token_ids):
        """Buffers for `rows` in `slots` slots, and the launch. Unused columns are poisoned: as f32 it is negative."""
        samples, chunks = len(rows), -(-vocab // CHUNK)
        logits = numpy.full((slots, pitch), numpy.nan, numpy.float32)
        for slot, row in enumerate(rows):
            logits[slot, :vocab] = row
        masked, words, start = [], numpy.full((slots, 12), device.POISON, numpy.uint32), 0
        for slot, p in enumerate(params):
            words[slot] = p.words(slot, start)
            masked.extend(p.masked)
            start += len(p.masked)
        b = {
            "header": header(samples, len(token_ids)), "params": upload(words),
            "masked": upload(numpy.array(masked or [0], numpy.uint32)),
            "token_ids": upload(numpy.array(list(token_ids) or [0], numpy.uint32)),
            "logits": upload(logits), "token_logits": poisoned((slots, LIST), numpy.float32),
            "stats": poisoned((slots, chunks, 8), numpy.uint32), "keys": poisoned((slots, chunks, LIST), numpy.uint64),
            "out": poisoned((slots, 8), numpy.uint32), "top_values": poisoned((slots, LIST), numpy.float32),
            "top_ids": poisoned((slots, LIST), numpy.uint32),
        }
        u32 = numpy.uint32

        def launch():
            self.logit_chunks(
                (chunks, slots), (256,),
                (b["header"], b["params"], b["masked"], b["token_ids"], b["logits"], u32(vocab), u32(pitch),
                 b["token_logits"], b["stats"], b["keys"]),
            )
            self.sample_rows(
                (slots,), (512,),
                (b["header"], b["params"], b["masked"], b["logits"], u32(vocab), u32(pitch), u32(chunks), b["stats"],
                 b["keys"], b["out"], b["top_values"], b["top_ids"]),
            )

        return b, launch

    def run(self, *arguments):
        buffers, launch = self.prepare(*arguments)
        launch()
        return {name: download(buffers[name]) for name in ("out", "logits", "token_logits", "top_values", "top_ids")}


# Rows.

def make_rows(random, vocab):
    """Named rows of logits of every kind."""
    def normal(scale):
        return (random.standard_normal(vocab) * scale).astype(numpy.float32)

    peaked = normal(1.0)
    peaked[random.integers(vocab)] = 30.0
    rounded = (bits(normal(3.0)) & 0xFFFF0000).view(numpy.float32)
    few = numpy.full(vocab, -numpy.inf, numpy.float32)
    few[random.choice(vocab, 5, replace=False)] = normal(1.0)[:5]
    one = numpy.full(vocab, -numpy.inf, numpy.float32)
    one[random.integers(vocab)] = -7.0
    zeros = numpy.where(random.random(vocab) < 0.5, 0.0, -0.0).astype(numpy.float32)
    twice = normal(2.0)
    twice[random.choice(vocab, 2, replace=False)] = 40.0
    far = normal(1.0) - numpy.float32(1e4)
    wide = normal(1e30)
    bunched = normal(1.0)
    start = int(random.integers(vocab - 200))
    bunched[start:start + 200] += 20.0
    broken = {}
    for name, value in (("nan", numpy.nan), ("+inf", numpy.inf)):
        broken[name] = normal(3.0)
        broken[name][random.integers(vocab)] = value
    return {
        "normal": normal(3.0), "flat": normal(0.1), "peaked": peaked, "bf16": rounded, "few": few, "one": one,
        "zeros": zeros, "equal": numpy.full(vocab, 1.5, numpy.float32), "twice": twice, "far": far, "wide": wide,
        "ascending": numpy.sort(normal(3.0)), "descending": -numpy.sort(normal(3.0)), "bunched": bunched,
        "none": numpy.full(vocab, -numpy.inf, numpy.float32), "nan at the end": with_last(normal(1.0), numpy.nan),
        **broken,
    }


def with_last(row, value):
    row[-1] = value
    return row


def make_params(random, vocab):
    """Settings of every mode and list length."""
    def uniform():
        return float(random.random())

    def masked(count):
        # Twice the same and one beyond the vocabulary do no harm.
        ids = [int(i) for i in random.choice(vocab, count, replace=False)]
        return tuple(ids + ids[:1] + [vocab + 3])

    yield from (Params(list=n) for n in (0, 1, 20, 100, 128))
    yield from (Params(HOST, list=n) for n in (0, 20))
    yield Params(list=20, masked=masked(100))
    yield Params(FROM_ALL, list=5, masked=masked(200), uniform=uniform())
    for temperature, min_p in itertools.product((0.3, 1.0, 2.0), (0.0, 0.05)):
        yield Params(FROM_ALL, 1.0 / temperature, min_p=min_p, uniform=uniform())
    for u in (0.0, 1.0 - 2.0**-53):
        yield Params(FROM_ALL, uniform=u)
        yield Params(FROM_LIST, top_k=50, list=50, top_p=0.9, uniform=u)
    for top_k, top_p, min_p in itertools.product((1, 20, 128), (1.0, 0.95, 0.5, 0.0), (0.0, 0.1)):
        more = int(random.integers(0, 129 - top_k))
        temperature = float(random.choice([0.6, 1.0, 1.5]))
        yield Params(FROM_LIST, 1.0 / temperature, top_k, top_p, min_p, uniform(), list=top_k + more)
    yield Params(FROM_LIST, top_k=20, list=20, masked=masked(50), uniform=uniform())
    yield Params(FROM_LIST, top_k=20, list=20, min_p=1.5)  # leaves nothing
    yield Params(FROM_ALL, min_p=1.5)
    yield Params(FROM_ALL, min_p=1.0, uniform=uniform())  # leaves the best
    yield Params(masked=tuple(range(vocab)), list=20)


class Differences:
    """Largest relative differences, for the table."""

    def __init__(self):
        self.lse = self.entropy = 0.0
        self.drawn = self.other = 0


def check_row(report, name, row, params, got, slot, token_ids, differences):
    what = f"{name}, {dataclasses.replace(params, masked=len(params.masked))}"
    out = got["out"][slot].view(OUT)[0]
    vocab = len(row)
    for i, token in enumerate(token_ids):
        want = row[token] if token < vocab else numpy.float32(numpy.nan)
        have = got["token_logits"][slot, i]
        report.check(have == want or (numpy.isnan(have) and numpy.isnan(want)), f"{what}: logit of {token}: {have}, not {want}")
    report.check(untouched(got["token_logits"][slot, len(token_ids):]), f"{what}: token logits beyond the wanted ones")
    logits = masked_logits(row, params)
    report.check((bits(got["logits"][slot, :vocab]) == bits(logits)).all(), f"{what}: the mask in the logits")
    finite = has_distribution(logits)
    ids = best(logits, params.list) if finite else numpy.array([], numpy.int64)
    if params.list == 0:
        report.check(untouched(got["top_ids"][slot]) and untouched(got["top_values"][slot]), f"{what}: an unwanted list")
    else:
        want = numpy.full(LIST, NO_TOKEN, numpy.uint32)
        want[:len(ids)] = ids
        values = numpy.full(LIST, -numpy.inf, numpy.float32)
        values[:len(ids)] = logits[ids]
        report.check((got["top_ids"][slot] == want).all(), f"{what}: best tokens {got['top_ids'][slot][:8]}, not {want[:8]}")
        report.check((got["top_values"][slot] == values).all(), f"{what}: best logits {got['top_values'][slot][:8]}")
    tokens = possible_tokens(logits, params) if finite and params.mode in (FROM_ALL, FROM_LIST) else iter(())
    token = next(tokens, int(numpy.argmax(logits)) if finite else None)
    if token is None:
        floats = [out[n] for n in ("logit", "max", "second", "lse", "entropy")]
        report.check(out["finite"] == 0 and out["token"] == 0 and numpy.isnan(floats).all(), f"{what}: not without a distribution: {out}")
        return
    report.check(out["finite"] == 1, f"{what}: not finite")
    argmax, largest, second, lse, entropy = statistics(logits)
    report.check(out["max"] == largest and out["second"] == second, f"{what}: largest {out['max']} and {out['second']}, not {largest} and {second}")
    differences.drawn += 1
    if out["token"] != token:
        differences.other += 1
        # Between the tokens that the smaller and the larger numbers find lie only some that hardly weigh anything.
        near = [token] if name.endswith(EXACT) else [token, *(t for t in tokens if t is not None)]
        listed = params.mode == FROM_ALL or out["token"] in best(logits, params.top_k)
        report.check(listed and min(near) <= out["token"] <= max(near), f"{what}: token {out['token']}, not {token}")
    if out["token"] < vocab:
        report.check(out["logit"] == logits[out["token"]], f"{what}: logit {out['logit']} of the token")
    if name != "wide":  # there f32 has no digits left for these
        # Sums of f32 lose what is 1e-7 of the largest term, as on the CPU.
        lse_off, entropy_off = abs(out["lse"] - lse) / max(abs(lse), 1.0), abs(out["entropy"] - entropy)
        differences.lse = max(differences.lse, lse_off)
        differences.entropy = max(differences.entropy, entropy_off / max(entropy, 0.1))
        report.check(lse_off <= 1e-5, f"{what}: log-sum-exp {out['lse']}, not {lse}")
        report.check(entropy_off <= 1e-5 * max(entropy, 0.1), f"{what}: entropy {out['entropy']}, not {entropy}")


def check_vocab(report, random, sampler, vocab):
    cases = []
    for name, row in make_rows(random, vocab).items():
        settings = list(make_params(random, vocab))
        # Everything with small vocabularies, and with large ones what a run has time for.
        if vocab > 4096:
            few = 16 if vocab < 100_000 else 8
            settings = [settings[i] for i in random.choice(len(settings), few, replace=False)]
        cases += [(name, row, params) for params in settings]
    random.shuffle(cases)
    differences, batch = Differences(), 16
    for start in range(0, len(cases), batch):
        part = cases[start:start + batch]
        slots = len(part) + int(random.integers(0, 3))
        pitch = -(-vocab // 4) * 4 + 4 * int(random.integers(0, 3))
        token_ids = [int(i) for i in random.integers(0, vocab, int(random.integers(0, 5)))]
        token_ids += [vocab + 1] * int(random.integers(0, 2))
        rows, params = [row for _, row, _ in part], [p for _, _, p in part]
        got = sampler.run(rows, params, vocab, pitch, slots, token_ids)
        for slot, (name, row, p) in enumerate(part):
            check_row(report, f"vocab {vocab}, {name}", row, p, got, slot, token_ids, differences)
        for name in ("out", "top_values", "top_ids", "token_logits"):
            report.check(untouched(got[name][len(part):]), f"vocab {vocab}: {name} of slots beyond the samples")
        slot = int(random.integers(len(part)))
        alone = sampler.run([rows[slot]], [params[slot]], vocab, pitch, 1, token_ids)
        for name in ("out", "top_values", "top_ids", "token_logits"):
            same = (bits(alone[name][0]) == bits(got[name][slot])).all()
            report.check(same, f"vocab {vocab}, {part[slot][0]}: {name} alone differs from {name} in company")
    report.row(
        f"vocab {vocab}",
        f"{len(cases)} rows, other tokens by rounding {differences.other} of {differences.drawn}, "
        f"log-sum-exp off {differences.lse:.1e}, entropy off {differences.entropy:.1e}",
    )


def check_frequencies(report, random, sampler):
    """Draws follow the distribution: chi-squared over many uniforms."""
    vocab, draws = 256, 4096
    row = (random.standard_normal(vocab) * 1.5).astype(numpy.float32)
    for mode in (FROM_ALL, FROM_LIST):
        params = [Params(mode, top_k=64, list=64, uniform=float(u)) for u in random.random(draws)]
        counts = numpy.zeros(vocab)
        for start in range(0, draws, 64):
            out = sampler.run([row] * 64, params[start:start + 64], vocab, vocab, 64, [])["out"]
            numpy.add.at(counts, out.view(OUT)["token"].ravel(), 1)
        weights = numpy.exp(row.astype(numpy.float64) - row.max())
        if mode == FROM_LIST:
            weights[numpy.argsort(-row, kind="stable")[64:]] = 0.0
        expected = weights / weights.sum() * draws
        often = expected >= 5.0
        chi = float(((counts - expected)[often] ** 2 / expected[often]).sum())
        degrees = int(often.sum())
        report.check(chi < degrees + 6.0 * (2.0 * degrees) ** 0.5, f"mode {mode}: chi-squared {chi:.0f} of {degrees}")
        report.check(counts[expected == 0.0].sum() == 0, f"mode {mode}: tokens without a weight were drawn")


def time_all(report, random, sampler):
    vocab = 151936
    rows = [(random.standard_normal(vocab) * 3.0).astype(numpy.float32) for _ in range(64)]
    cases = {
        "greedy": Params(), "greedy, list 20": Params(list=20), "greedy, list 100": Params(list=100),
        "top_k 20, top_p 0.95": Params(FROM_LIST, 1.0 / 0.6, 20, 0.95, list=20),
        "top_k 128": Params(FROM_LIST, top_k=128, list=128), "all": Params(FROM_ALL),
    }
    for (name, params), slots in itertools.product(cases.items(), (1, 8, 64)):
        _, launch = sampler.prepare(rows[:slots], [params] * slots, vocab, vocab, slots, [])
        report.row(f"{name}, {slots} rows of {vocab}", f"{device.microseconds(launch):.1f} us")
    masked = tuple(int(i) for i in random.choice(vocab, 300, replace=False))
    _, launch = sampler.prepare(rows[:1], [Params(masked=masked)], vocab, vocab, 1, [])
    report.row("greedy, 300 masked, 1 row", f"{device.microseconds(launch):.1f} us")
    _, launch = sampler.prepare([numpy.zeros(vocab, numpy.float32)], [Params(list=128)], vocab, vocab, 1, [])
    report.row("greedy, list 128, all equal, 1 row", f"{device.microseconds(launch):.1f} us")


def main():
    random = numpy.random.default_rng(new_seed())
    report, sampler = Report(), Kernels()
    for vocab in VOCABS:
        check_vocab(report, random, sampler, vocab)
    check_frequencies(report, random, sampler)
    time_all(report, random, sampler)
    report.finish()


if __name__ == "__main__":
    main()
