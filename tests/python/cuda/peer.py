"""A transformers loop that routes tokens as R2R does, to compare with. Needs a GPU, torch and transformers.

    OUT=. python3 tests/python/cuda/peer.py [SECONDS]

Random weights in the shapes of Qwen3-0.6B and Qwen3-32B, 1024 tokens of context, requests in lockstep batches. The small
model proposes every token; with probability 0.35 a request takes the large model's token instead. When any request of the
batch does, the large model reads what it has not seen of all of them, in one call.

* eager: the models as they are, with a DynamicCache.
* compiled: a static cache, decoder layers by torch.compile (one compilation for all layers of a model), and the whole
  step in one CUDA graph. Catching up takes one-token steps ("one"), or a graph for each number of tokens ("lengths").

Writes milliseconds a step and tokens a second to $OUT/peer.json after every part. A part that fails is reported and
left out; at SECONDS (150) the rest is.
"""

import inspect
import json
import os
import sys
import threading
import time
import traceback

import torch
import transformers
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

DEVICE = "cuda"
CONTEXT, ROOM, ROUTED = 1024, 512, 0.35
SHARED = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
SHAPES = {
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
              "tie_word_embeddings": True, **SHARED},
    "large": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
              "tie_word_embeddings": False, **SHARED},
}
LENGTHS = 6  # most tokens that a graph of its own catches up on


def build(shape):
    rope = {"rope_type": "default", "rope_theta": 1e6}
    by_parameters = hasattr(Qwen3Config, "rope_parameters")
    config = Qwen3Config(**shape, **({"rope_parameters": rope} if by_parameters else {"rope_theta": 1e6}))
    Qwen3PreTrainedModel._init_weights = lambda self, module: None  # what the modules' constructors do is enough
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        return Qwen3ForCausalLM(config).eval()


def cache_name(forward):
    """What this version of transformers calls the cache."""
    return "past_key_values" if "past_key_values" in inspect.signature(forward).parameters else "cache"


class Eager:
    """`rows` sequences of a model in a DynamicCache."""

    def __init__(self, model, rows):
        self.model, self.rows, self.cache = model, rows, DynamicCache()
        self.name = cache_name(model.forward)

    def read(self, tokens):
        """Read tokens [rows, n]; the most likely next ones [rows]."""
        out = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{self.name: self.cache})
        return out.logits[:, -1].argmax(-1)


class LayerCache:
    """One layer's keys and values of fixed size, written at `positions`."""

    def __init__(self, keys, values, positions):
        self.keys, self.values, self.positions = keys, values, positions

    def update(self, keys, values, *_, **__):
        self.keys.index_copy_(2, self.positions, keys)
        self.values.index_copy_(2, self.positions, values)
        return self.keys, self.values


def run_layer(layer, x, mask, cos, sin, positions, keys, values, name, old):
    more = {"cache_position": positions} if old else {}
    out = layer(
        x, attention_mask=mask, position_embeddings=(cos, sin), position_ids=positions[None], use_cache=True,
        **{name: LayerCache(keys, values, positions)}, **more,
    )
    return out[0] if isinstance(out, tuple) else out


class Compiled:
    """`rows` sequences of a model in a static cache; calls with few tokens are graphs."""

    def __init__(self, model, rows, compiled_layer, one_by_one):
        self.model, self.rows, self.length, self.one_by_one = model, rows, 0, one_by_one
        config, size = model.config, CONTEXT + ROOM
        layer = model.model.layers[0]
        parameters = inspect.signature(layer.forward).parameters
        self.name, self.old = cache_name(layer.forward), "cache_position" in parameters
        for layer in model.model.layers:
            layer.self_attn.layer_idx = 0  # every layer gets a cache of its own, so that all share one compilation
        shape = (rows, config.num_key_value_heads, size, config.head_dim)
        new = lambda: torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16)
        self.caches = [(new(), new()) for _ in model.model.layers]
        self.visible = torch.ones(size, size, device=DEVICE, dtype=torch.bool).tril()
        self.positions = torch.arange(size, device=DEVICE)
        self.compiled_layer, self.graphs, self.pool = compiled_layer, {}, None

    def forward(self, tokens, positions, layer_function):
        model = self.model.model
        x = model.embed_tokens(tokens)
        cos, sin = model.rotary_emb(x, positions[None])
        mask = self.visible[positions][None, None].expand(self.rows, 1, -1, -1)
        for layer, (keys, values) in zip(model.layers, self.caches):
            x = layer_function(layer, x, mask, cos, sin, positions, keys, values, self.name, self.old)
        return self.model.lm_head(model.norm(x[:, -1])).argmax(-1)

    def capture(self, count):
        # Only one-token steps are compiled; a graph is all that the others get.
        layer_function = self.compiled_layer if count == 1 else run_layer
        tokens = torch.zeros(self.rows, count, device=DEVICE, dtype=torch.long)
        positions = self.positions[self.length:self.length + count].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.forward(tokens, positions, layer_function)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = self.forward(tokens, positions, layer_function)
        self.pool = self.pool or graph.pool()
        self.graphs[count] = graph, tokens, positions, out

    def read(self, tokens):
        """As `Eager.read`."""
        count = tokens.shape[1]
        if count > LENGTHS and self.length == 0:
            out = self.forward(tokens, self.positions[:count], run_layer)
            self.length = count
            return out
        most = 1 if self.one_by_one else LENGTHS
        for part in tokens.split(most, dim=1):
            size = part.shape[1]
            graph, into, positions, out = self.graphs[size]
            into.copy_(part)
            positions.copy_(self.positions[self.length:self.length + size])
            graph.replay()
            self.length += size
        return out.clone()

    def prepare(self):
        for count in range(1, 2 if self.one_by_one else LENGTHS + 1):
            self.capture(count)


def random_tokens(rows, count):
    return torch.randint(0, SHARED["vocab_size"], (rows, count), device=DEVICE)


def started(make, rows):
    reader = make(rows)
    reader.read(random_tokens(rows, CONTEXT))
    if isinstance(reader, Compiled):
        reader.prepare()
    return reader


def step_time(reader, steps):
    """Median milliseconds of a one-token step, the token read back."""
    token, times = random_tokens(reader.rows, 1), []
    for step in range(steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        token = reader.read(token)[:, None]
        token.tolist()
        if step >= 3:
            times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 2]


def routed_loop(small, large, steps, seed=1):
    """Tokens a second of the routed batch, and steps in which the large model took part."""
    random = torch.Generator().manual_seed(seed)
    rows, pending, calls, warm = small.rows, [], 0, 4
    token = random_tokens(rows, 1)
    for step in range(steps + warm):
        if step == warm:
            torch.cuda.synchronize()
            start, calls = time.perf_counter(), 0
        pending.append(token)
        proposal = small.read(token)
        proposal.tolist()  # a router decides on the host
        routed = torch.rand(rows, generator=random) < ROUTED
        if routed.any():
            answer = large.read(torch.cat(pending, dim=1))
            proposal = torch.where(routed.to(DEVICE), answer, proposal)
            pending, calls = [], calls + 1
        token = proposal[:, None]
    token.tolist()
    seconds = time.perf_counter() - start
    return {"tokens_per_second": rows * steps / seconds, "ms_per_token_step": seconds / steps * 1e3, "large_calls": calls,
            "steps": steps}


class Results:
    def __init__(self, limit):
        self.start, self.values = time.perf_counter(), {}
        self.path = os.path.join(os.environ.get("OUT", "."), "peer.json")
        self.lock = threading.Lock()
        timer = threading.Timer(limit, self.stop)
        timer.daemon = True
        timer.start()

    def stop(self):
        self.put("stopped", "the time limit; what follows is missing")
        os._exit(0)

    def put(self, name, value):
        with self.lock:
            self.values[name] = value
            with open(self.path, "w", encoding="utf-8") as file:
                json.dump(self.values, file, indent=1)
        print(f"{time.perf_counter() - self.start:6.1f} s  {name}: {value}", flush=True)

    def part(self, name, compute):
        """The value of `compute`, reported unless it is a model; None when it fails."""
        try:
            value = compute()
        except Exception as error:  # the other parts are worth having
            traceback.print_exc()
            self.put(name, f"failed: {type(error).__name__}: {str(error)[:300]}")
            return None
        if isinstance(value, (int, float, dict, str)):
            self.put(name, value)
        return value


@torch.inference_mode()
def main():
    results = Results(float(sys.argv[1]) if len(sys.argv) > 1 else 150.0)
    card = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    results.put("versions", f"torch {torch.__version__}, transformers {transformers.__version__}, {card}")
    models = {name: results.part(f"{name}: build", lambda shape=shape: build(shape)) for name, shape in SHAPES.items()}
    models = {name: model for name, model in models.items() if model is not None}
    for name, model in models.items():
        results.put(f"{name}: attention", model.config._attn_implementation)

    def eager(name):
        return lambda rows: Eager(models[name], rows)

    # Each model has a compiled function of its own, so that neither counts against the other's recompilations.
    layer_functions = {name: torch.compile(run_layer, dynamic=False) for name in models}

    def compiled(name, one_by_one, uncompiled=False):
        function = run_layer if uncompiled else layer_functions[name]
        return lambda rows: Compiled(models[name], rows, function, one_by_one)

    for name in models:
        for rows in (1, 8):
            results.part(f"{name}: eager, rows {rows}, ms", lambda: step_time(started(eager(name), rows), 8))
    if len(models) == 2:
        for rows in (1, 8):
            loop = lambda: routed_loop(started(eager("small"), rows), started(eager("large"), rows), 40)
            results.part(f"routed: eager, requests {rows}", loop)
    for name in models:
        for rows in (1, 8):
            key = f"{name}: compiled, rows {rows}, ms"
            value = results.part(key, lambda: step_time(started(compiled(name, True), rows), 30))
            if value is None:
                key = f"{name}: graph of eager layers, rows {rows}, ms"
                results.part(key, lambda: step_time(started(compiled(name, True, True), rows), 30))
    if len(models) == 2:
        failed = [key for key, value in results.values.items() if "compiled" in key and str(value).startswith("failed")]
        for rows in (1, 8):
            for how, one_by_one in (("one", True), ("lengths", False)):
                make = lambda name: compiled(name, one_by_one, any(key.startswith(name) for key in failed))
                loop = lambda: routed_loop(started(make("small"), rows), started(make("large"), rows), 100)
                results.part(f"routed: compiled, catching up by {how}, requests {rows}", loop)
    print(json.dumps(results.values, indent=1))


if __name__ == "__main__":
    main()
